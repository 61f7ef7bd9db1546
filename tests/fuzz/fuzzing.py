"""Random input for decoders and front doors, by hypothesis, which needs no instrumented build and shrinks failures.

Each door is tried for `SECONDS`: a moment in `make test`, and `FUZZ_MINUTES` minutes in `make fuzz`.
"""

import copy
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS = 60 * float(os.environ.get("FUZZ_MINUTES", "0")) or 1.5
BATCH = 100
"""Examples between two checks of the clock."""
EXTREMES = [b"\x00" * 8, b"\xff" * 8, b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\x80" + b"\x00" * 7, b"\xff\xff\xff\x7f"]

T = TypeVar("T")


def fuzz(
    strategy: st.SearchStrategy[T],
    check: Callable[[T], object],
    known: Iterable[T] = (),
    *,
    batch: int = BATCH,
    share: float = 1.0,
) -> None:
    """Calls `check` with the `known` examples, which have failed once, and with random ones until the time is over.

    `share`: of the door's time.
    """
    for example in known:
        check(example)

    @settings(
        max_examples=batch,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(strategy)
    def try_some(value: T) -> None:
        check(value)

    end = time.monotonic() + share * SECONDS
    while time.monotonic() < end:
        try_some()


@st.composite
def mutated(draw: st.DrawFn, samples: Sequence[bytes], tokens: Sequence[bytes] = ()) -> bytes:
    """One of the samples with a few changes: bytes that are flipped, cut out, repeated or put in."""
    data = bytearray(draw(st.sampled_from(samples)))
    inserted = st.one_of(st.binary(max_size=12), st.sampled_from([*EXTREMES, *tokens]))
    for _ in range(draw(st.integers(0, 5))):
        place = draw(st.integers(0, len(data)))
        end = min(place + draw(st.one_of(st.integers(0, 8), st.integers(0, 400))), len(data))
        match draw(st.sampled_from(["put in", "replace", "cut out", "repeat", "flip", "end"])):
            case "put in":
                data[place:place] = draw(inserted)
            case "replace":
                data[place:end] = draw(inserted)
            case "cut out":
                del data[place:end]
            case "repeat":
                data[place:place] = data[place:end] * draw(st.integers(1, 20))
            case "flip" if place < len(data):
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "end":
                del data[place:]
    return bytes(data)


def _nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = [value]
    return value


numbers = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]),
    st.sampled_from([-(2**31), -(2**63), -(2**63) - 1, -(2**64)]),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "\ud7ff", "\U0010ffff", "a" * 3000, "{{ x }}", "{% for a in b %}", "../../etc"]),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts, inner, max_size=4),
        st.builds(_nested, st.sampled_from([10, 63, 64, 65, 200, 900, 1100]), inner),
    ),
    max_leaves=8,
)
"""Anything that JSON can say."""


@st.composite
def edited(draw: st.DrawFn, samples: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> dict[str, Any]:
    """One of the samples in which some values, at any depth, are replaced by others, left out, or put in by name."""
    sample: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(0, 3))):
        place = sample
        while inner := [value for value in place.values() if isinstance(value, dict)]:
            if not draw(st.booleans()):
                break
            place = inner[draw(st.integers(0, len(inner) - 1))]
        name = draw(st.one_of(st.sampled_from([*place, *names] or ["x"]), texts))
        if draw(st.integers(0, 4)):
            place[name] = draw(values)
        else:
            place.pop(name, None)
    return sample


def json_bytes(samples: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> st.SearchStrategy[bytes]:
    """JSON that is valid or nearly so."""
    encoded = [msgspec.json.encode(sample) for sample in samples]
    tokens = [
        b"[" * 2000,
        b'{"a":' * 2000,
        b"null",
        b"1e400",
        b"-",
        b"\\ud800",
        b'"',
        b"\xff",
        b"[],",
        b"99999999999999999999",
    ]
    return st.one_of(edited(samples, names).map(encode_json), mutated(encoded, tokens), st.binary(max_size=40))


def encode_json(value: object) -> bytes:
    """Encodes what msgspec may refuse to: integers of any size, and any depth."""
    match value:
        case dict():
            return b"{%s}" % b",".join(msgspec.json.encode(k) + b":" + encode_json(v) for k, v in value.items())
        case [one] if isinstance(one, list):
            depth = 0
            while isinstance(value, list) and len(value) == 1:
                value, depth = value[0], depth + 1
            return b"[" * depth + encode_json(value) + b"]" * depth
        case list():
            return b"[%s]" % b",".join(map(encode_json, value))
        case bool() | None | str() | float():
            return msgspec.json.encode(value)
        case _:
            return str(value).encode()
