"""A process goes on where Linux refuses its settings."""

import os
import sys

import pytest

from pagewire.shared.process.linux_process import use_batch_scheduling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")


@pytest.mark.parametrize("refusal", [PermissionError("seccomp"), OSError(22, "not this policy")])
def test_a_sandbox_may_refuse_batch_scheduling(monkeypatch: pytest.MonkeyPatch, refusal: OSError) -> None:
    policies: list[int] = []

    def refuse(_: int, policy: int, __: os.sched_param) -> None:
        policies.append(policy)
        raise refusal

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    use_batch_scheduling()
    assert policies == [os.SCHED_BATCH]
