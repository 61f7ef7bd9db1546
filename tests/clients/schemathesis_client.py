"""Tests every route with requests made from `/openapi.json`: python tests/clients/schemathesis_client.py URL.

It is the default run of `st run`, with all its checks. A valid body may also be answered with 400 or 422: JSON Schema
cannot say which fields exclude each other, nor what the vocabulary and the context of the model are.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).with_name("st")
SEED = "1"
SETTINGS = """
[[operations]]
include-method = "POST"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "422"]
"""


def main(url: str) -> str:
    """Returns what was run. Raises AssertionError when an answer is a fault or not what the document says."""
    flags = ["--seed", SEED, "--no-color"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps files where it runs
        Path(folder, "schemathesis.toml").write_text(SETTINGS)
        done = subprocess.run(
            [COMMAND, "run", f"{url}/openapi.json", *flags],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    operations = re.search(r"Tested: (\d+)", done.stdout)
    cases = re.search(r"(\d+) generated, \d+ passed", done.stdout)
    assert operations, done.stdout
    assert cases, done.stdout
    assert int(operations[1]) > 15 < int(cases[1]), done.stdout
    return f"default run, all checks: {operations[1]} operations, {cases[1]} requests"


if __name__ == "__main__":
    print(main(sys.argv[1]))
