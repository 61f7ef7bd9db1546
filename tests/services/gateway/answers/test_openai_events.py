import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.gateway.answers.openai_events import CompletionEvents, EventFields
from pagewire.services.gateway.answers.openai_shapes import Completion, CompletionChoice
from pagewire.shared.messages.client import Delta, Final, FinalChoice, Usage

NAMES = st.text(max_size=8) | st.sampled_from(['"text":""', '","text":"', "text", '\\"text":""\\'])


def parsed(events: bytes) -> list[dict[str, Any]]:
    *parts, rest = events.split(b"\n\n")
    assert rest == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def completion(request_id: str, model: str, created: int, choices: list[CompletionChoice]) -> Any:
    return msgspec.to_builtins(Completion(f"cmpl-{request_id}", created, model, choices))


@settings(deadline=None)
@given(NAMES, NAMES, st.lists(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=6)), max_size=4), max_size=4))
def test_an_event_of_text_is_a_whole_completion(
    request_id: str, model: str, batches: list[list[tuple[int, str]]]
) -> None:
    """Whatever the names and the texts are, and whatever is encoded only once."""
    events = CompletionEvents(request_id, model)
    for batch in batches:
        completions = parsed(events.texts([Delta(index, 0, text, [1]) for index, text in batch]))
        created = completions[0]["created"] if completions else 0
        assert completions == [
            completion(request_id, model, created, [CompletionChoice(index, text)]) for index, text in batch if text
        ]


def test_the_last_events_have_the_finish_reasons_and_then_the_usage() -> None:
    final = Final("r", [FinalChoice(1, "stop", "!"), FinalChoice(0, "length", None)], Usage(3, 4, 1))
    events = CompletionEvents("r", "m")
    assert len(parsed(events.texts([Delta(0, 0, "x", [1])]))) == 1
    *ends, last = parsed(events.ends(final, usage=True))
    reasons = [(end["choices"][0]["index"], end["choices"][0]["finish_reason"], end["usage"]) for end in ends]
    assert reasons == [(1, "stop", None), (0, "length", None)]
    assert ends[0]["choices"][0]["stop_reason"] == "!"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert len(parsed(CompletionEvents("r", "m").ends(final, usage=False))) == 2


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=6), st.integers(1, 3)), max_size=4), max_size=4))
def test_counted_events_have_the_usage_so_far(batches: list[list[tuple[int, str, int]]]) -> None:
    counted, plain = CompletionEvents("r", "m", EventFields(counted=True)), CompletionEvents("r", "m")
    tokens = 0
    for batch in batches:
        deltas = [Delta(index, 0, text, [1] * count) for index, text, count in batch]
        expected = []
        for delta in deltas:
            tokens += len(delta.token_ids)
            if delta.text:
                expected.append((5, tokens, 5 + tokens, None))
        completions = parsed(counted.texts(deltas, 5))
        assert [tuple(event.pop("usage").values()) for event in completions] == expected
        bare = parsed(plain.texts(deltas, 5))
        assert [event["choices"] for event in completions] == [event["choices"] for event in bare]
        assert all(event["usage"] is None for event in bare)
    final = Final("r", [FinalChoice(0, "stop", None)], Usage(5, tokens, 2))
    end, last = parsed(counted.ends(final, usage=True))
    assert end["usage"] == dict(last["usage"], prompt_tokens_details=None)


def test_events_have_no_usage_before_the_prompts_length_is_known() -> None:
    events = CompletionEvents("r", "m", EventFields(counted=True))
    (early,) = parsed(events.texts([Delta(0, 0, "a", [1])], None))
    (late,) = parsed(events.texts([Delta(0, 1, "b", [2])], 7))
    assert early["usage"] is None
    assert late["usage"]["total_tokens"] == 9


def test_the_bytes_behind_the_last_event_are_openais() -> None:
    assert CompletionEvents.done == b"data: [DONE]\n\n"
