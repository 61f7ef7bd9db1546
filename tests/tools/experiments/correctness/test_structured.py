import json
from pathlib import Path

import pytest

from tools.experiments.correctness import structured
from tools.experiments.correctness.structured import Outputs, Times, output_table, time_table


def test_the_tables_have_shares_and_ratios() -> None:
    lines = output_table([Outputs("old", 600, 587, 300, 299), Outputs("new", 2, 2, 2, 2, tokens=100, rows=80.0)])
    assert lines[-2:] == ["| old | 600 | 587 (97.8%) | 300 | 299 |  |", "| new | 2 | 2 (100.0%) | 2 | 2 | 0.80 |"]
    rows = time_table([Times("a", [20.0, 22.0], [20.0, 20.0], [2.0]), Times("b", [21.0, 21.42], [21.0, 21.0], [2.5])])
    assert rows[-2:] == ["| a | 21.00 | 20.00 | 1.000 | 2.000 |", "| b | 21.21 | 21.00 | 1.010 | 2.500 |"]


@pytest.mark.full
def test_every_output_that_ends_is_valid(tmp_path: Path) -> None:
    schemas, output = tmp_path / "schemas.jsonl", tmp_path / "structured.json"
    properties = {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
    lines = [
        {"name": "person", "schema": {"type": "object", "properties": properties, "required": ["kind"]}},
        {"name": "code", "schema": {"type": "string", "pattern": "^[0-9]{3}$", "format": "country-code"}},
        {"name": "other", "schema": {"not": {"type": "string"}}},
    ]
    schemas.write_text("\n".join(map(json.dumps, lines)))
    assert structured.main(["--schemas", str(schemas), "--turns", "0", "--output", str(output)]) == 0
    for outcome in json.loads(output.read_text())["outputs"]:
        assert outcome["compiled"] == 2
        assert outcome["ended"] == outcome["valid"] > 0
