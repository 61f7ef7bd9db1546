from pagewire.commands import status
from pagewire.shared.process.discovery import Stats


def test_columns_are_apart_however_long_their_cells_are() -> None:
    metadata = {"ready": "true", "model": "smollm2-135m-instruct", "load.running": "2"}
    lines = status.table([Stats("pagewire-tokenizer", "3f2a9c1b0d4e", "", metadata)])
    assert [line.split() for line in lines] == [
        ["service", "instance", "state", "model", "load"],
        ["tokenizer", "3f2a9c1b0d4e", "ready", "smollm2-135m-instruct", "running=2"],
    ]
    assert lines[0].index("load") == lines[1].index("running=2")
