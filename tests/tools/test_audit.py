import json
from typing import Any

from tools.audit import verdict


def said(*packages: dict[str, Any]) -> tuple[int, str]:
    return verdict(json.dumps({"dependencies": packages}))


SAFE = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found"}
VULNERABLE = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}


def test_a_vulnerability_fails_the_audit() -> None:
    code, text = said(SAFE, VULNERABLE, SKIPPED)
    assert code == 1
    assert text == "c 2: PYSEC-1, fixed in 3\n2 of 3 packages audited, 1 known vulnerabilities"
    assert said(SAFE) == (0, "1 of 1 packages audited, 0 known vulnerabilities")


def test_nothing_is_claimed_without_a_database() -> None:
    for code, text in (verdict(""), said(SKIPPED), said()):
        assert code == 0
        assert text.startswith("audit skipped")
