"""The sampling table says everything about a parameter: what follows from it, and that nothing says it again."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from pagewire.kernels.cpu.build import record_header
from pagewire.kernels.triton.sampling.sampling_columns import COLUMNS
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.messages.work import GREEDY
from pagewire.shared.sampling_parameters import PARAMETERS, RECORD, Parameter, record, unpack_record
from tests.kernels.triton.ahead.tensors import SAMPLING_TENSORS

ROOT = Path(__file__).parents[2]
NOT_COUNTED = (
    *(":!tests", ":!docs", ":!bench", ":!tools", ":!*.md", ":!*.txt"),
    ":!services/gateway/requests/api_elements.py",  # names the fields of other servers' APIs
)
MOST_FILES = 6
COMMON = ("temperature", "top_p")
"""Named wherever sampling is shown, such as in benchmarks."""


@pytest.mark.parametrize(
    "name",
    [
        *(parameter.name for parameter in PARAMETERS if parameter.name not in COMMON),
        *("stop_token_ids", "best_of", "allowed_token_ids", "logit_bias"),
    ],
)
def test_a_parameter_is_named_in_few_files(name: str) -> None:
    """The client's message, the table, and the samplers that read it: whoever adds a parameter touches no more."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "grep", "-l", "-w", name, "--", ".", *NOT_COUNTED]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "shared/messages/client.py" in files
    assert len(files) <= MOST_FILES, files


def test_every_parameter_is_a_field_of_the_client_with_a_default_in_range() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
    for parameter in PARAMETERS:
        default = fields[parameter.name].default
        parameter.check(default)
        parameter.check(parameter.neutral)
        assert parameter.resolve(parameter.neutral, 100) == parameter.neutral


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_value_out_of_range_is_refused_by_name(parameter: Parameter) -> None:
    for value in (parameter.lowest - 1, float("nan")):
        with pytest.raises(InvalidRequest, match=f"^{parameter.name} must be"):
            parameter.check(value)


def test_a_record_is_neutral_in_all_other_columns() -> None:
    columns = record(temperature=0.5, key=2**64 - 1)
    assert columns["temperature"] == 0.5
    assert int(columns["key"]) == 2**64 - 1
    for parameter in PARAMETERS[1:]:
        assert columns[parameter.name] == parameter.neutral
    assert unpack_record(GREEDY) == record()


def test_a_record_travels_as_bytes_and_can_be_completed() -> None:
    sent = record(temperature=0.5)
    received = unpack_record(sent.tobytes())
    assert received == sent
    received["min_length"] = 7
    assert received == record(temperature=0.5, min_length=7)
    with pytest.raises(ValueError):
        unpack_record(sent.tobytes()[:-1])


def test_the_forms_that_kernels_read_have_every_column() -> None:
    assert tuple(COLUMNS) == RECORD.names
    assert set(COLUMNS) <= set(SAMPLING_TENSORS)
    lines = record_header().splitlines()
    assert [line.split()[-1].rstrip(";") for line in lines if line.startswith("    ")] == list(RECORD.names or ())
