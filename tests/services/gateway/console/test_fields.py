import msgspec

from pagewire.services.gateway.console import fields
from pagewire.services.gateway.openapi import ROUTES
from pagewire.services.gateway.openapi import fields as documented
from pagewire.shared.messages.client import SamplingParams

OFFERED = msgspec.json.decode(fields.encoded())


def test_every_sampling_field_is_offered_with_its_default_and_meaning() -> None:
    for rows in OFFERED.values():
        by_name = {row["name"]: row for row in rows}
        for field in msgspec.structs.fields(SamplingParams):
            if field.name in fields.OWN:
                continue
            assert by_name[field.name]["meaning"]
        assert by_name["temperature"]["default"] == 1.0
        assert (by_name["temperature"]["minimum"], by_name["temperature"]["maximum"]) == (0.0, 2.0)


def test_meanings_equal_the_documentation() -> None:
    for kind, path in fields.KINDS.items():
        meanings = {name: text for name, _, text in documented(ROUTES[path])}
        assert all(row["meaning"] == meanings[row["name"]] for row in OFFERED[kind])


def test_without_a_limit_a_chat_runs_to_the_end_of_the_context() -> None:
    defaults = {kind: {row["name"]: row["default"] for row in rows} for kind, rows in OFFERED.items()}
    assert (defaults["chat"]["max_tokens"], defaults["completion"]["max_tokens"]) == (None, 16)
