import pytest

from pagewire.shared.bus.framing import MAX_CONTROL_LINE
from pagewire.shared.subjects import (
    ANY,
    INBOX_LENGTH,
    client_inbox,
    for_everyone,
    for_tenant,
    is_client_inbox,
    model_token,
    owned,
    owner_and_text,
    owner_of,
    tenant_of,
    work_queue,
    work_queues,
)
from pagewire.shared.wire_version import WIRE_VERSION


@pytest.mark.parametrize(
    ("priority", "name"),
    [(-(2**31), "urgent"), (-1, "urgent"), (0, "normal"), (1, "background"), (7, "background")],
)
def test_a_queue_per_class_of_priorities(priority: int, name: str) -> None:
    assert work_queue("m", priority, ANY) == f"m.{WIRE_VERSION}.{name}.any"


def test_a_targets_queues_are_its_work_queues_by_priority() -> None:
    assert work_queues("m", "abc") == [work_queue("m", priority, "abc") for priority in (-5, 0, 5)]


def test_a_model_is_one_token() -> None:
    assert model_token("org/model-1.5 b") == "org_model-1_5_b"


@pytest.mark.parametrize("subject", ["_INBOX.a", "_INBOX.aB3-_.0.1", "_INBOX." + "x" * (INBOX_LENGTH - 7)])
def test_an_inbox_of_a_client_is_recognised(subject: str) -> None:
    assert is_client_inbox(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "_INBOX",
        "_INBOX.",
        "_INBOX.a b",
        "_INBOX.a.*",
        "_INBOX.>",
        "_INBOX.\n",
        "_SVC.a",
        "x._INBOX.a",
        "_TENANT.a",
        "_TENANT",
    ],
)
def test_any_other_subject_is_no_inbox_of_a_client(subject: str) -> None:
    assert not is_client_inbox(subject)


def test_an_inbox_and_a_reply_subject_fit_into_a_line_of_the_protocol() -> None:
    """With a longer one, a frame that asks whether its reader is there could not be sent, nor anything behind it."""
    assert not is_client_inbox("_INBOX." + "x" * (INBOX_LENGTH - 6))
    assert 2 * INBOX_LENGTH < MAX_CONTROL_LINE // 4


@pytest.mark.parametrize("tenant", ["", "alice"])
def test_a_subject_and_an_inbox_name_their_tenant(tenant: str) -> None:
    for subject in ("pagewire.v1.models", "pagewire.v1.generate.m", "pagewire.v1.cancel.tenant.r.0"):
        assert tenant_of(for_tenant(subject, tenant)) == tenant
    assert owner_of(f"{client_inbox(tenant)}.a.1") == tenant


def test_requests_of_all_clients_match_two_patterns() -> None:
    assert for_everyone("pagewire.v1.generate.*") == ("pagewire.v1.generate.*", "pagewire.v1.tenant.*.generate.*")


def test_no_two_tenants_own_the_same_text() -> None:
    pairs = [(tenant, text) for tenant in ("", "a", "b") for text in ("", "r", "a~r", "~r", "~", "a~")]
    assert len({owned(*pair) for pair in pairs}) == len(pairs)
    assert [owner_and_text(owned(*pair)) for pair in pairs] == pairs
    assert owned("", "r") == "r"
