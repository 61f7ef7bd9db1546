import json
from pathlib import Path

import pytest

from tools.experiments.correctness import drafted_schemas
from tools.experiments.correctness.drafted_schemas import Side, table


def test_the_table_has_the_share_of_accepted_tokens() -> None:
    lines = table([Side("none", 14, 500), Side("suffix", 14, 500, 200, 150, ["a"])], 600)
    assert lines[-2:] == [
        "| none | 586 of 600 | 500 | 0 | 0.00 | 0 |",
        "| suffix | 586 of 600 | 500 | 200 | 0.75 | 1 |",
    ]


@pytest.mark.full
def test_drafts_change_no_answer(tmp_path: Path) -> None:
    file, output = tmp_path / "schemas.jsonl", tmp_path / "drafted.json"
    schema = {"type": "array", "items": {"enum": ["north", "south"]}, "minItems": 6, "maxItems": 9}
    schemas = [{"name": "winds", "schema": schema}, {"name": "refused", "schema": {"not": {"type": "string"}}}]
    file.write_text("\n".join(map(json.dumps, schemas)))
    assert drafted_schemas.main(["--file", str(file), "--methods", "none", "suffix", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["schemas"] == 2
    assert [side["refused"] for side in results["runs"]] == [1, 1]
    assert results["runs"][0]["tokens"] == results["runs"][1]["tokens"] > 0
