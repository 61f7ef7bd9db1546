"""Looks for known vulnerabilities of the packages in a lock file: `python -m tools.audit deploy/requirements.lock`.

`pip-audit` asks the advisory database of the Python Packaging Authority, which has no offline form. Where it cannot be
asked, nothing is claimed: the audit is skipped, and says so.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

COMMAND = ("pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json")


def main(lock: str) -> int:
    """Returns 1 if a package has a known flaw."""
    if find_spec("pip_audit") is None:
        print("audit skipped: pip-audit is not installed")
        return 0
    command = [sys.executable, "-m", *COMMAND, "--requirement", lock]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # it ends with 1 for any reason
    code, text = verdict(done.stdout)
    print(text)
    return code


def verdict(output: str) -> tuple[int, str]:
    """Returns the exit code and what to say about pip-audit's output, which is empty if it has failed."""
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return 0, "audit skipped: the advisory database cannot be reached"
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        return 0, "audit skipped: the advisory database knows none of the packages, as a mirror without it does"
    vulnerabilities = [
        f"{package['name']} {package['version']}: {each['id']}, fixed in {', '.join(each['fix_versions']) or 'none'}"
        for package in audited
        for each in package["vulns"]
    ]
    text = f"{len(audited)} of {len(packages)} packages audited, {len(vulnerabilities)} known vulnerabilities"
    return int(bool(vulnerabilities)), "\n".join([*vulnerabilities, text])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
