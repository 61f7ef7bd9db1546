"""The messages between services: whatever arrives is decoded, or refused as unreadable."""

import importlib
import pkgutil

import msgspec
import pytest
from hypothesis import strategies as st

import pagewire.shared.messages as messages
from pagewire.services.detokenizer.sequence_map import SequenceMap
from pagewire.shared.messages import UNREADABLE, WIRE_VERSION, Decoder, Wire, encode, pack
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.step_reader import StepReader
from tests.fuzz.fuzzing import fuzz, mutated, values

for module in pkgutil.iter_modules(messages.__path__):
    importlib.import_module(f"{messages.__name__}.{module.name}")

KINDS = sorted(Wire.__subclasses__(), key=lambda kind: kind.__name__)
columns = st.one_of(st.lists(st.integers(0, 2**32 - 1), max_size=4).map(pack), st.binary(max_size=20))
fields = st.one_of(st.integers(-(2**63), 2**64 - 1), columns, values)
STEP = encode(StepOutput(1, 0, 1, pack([1, 2]), pack([0, 0]), pack([3, 3]), pack([7, 8]), b"\0\1", 10))
MANY = encode(
    StepOutput(
        1, 0, 1, pack([1, 2]), pack([0, 0]), pack([3, 3]), pack([7, 8, 9]), b"\0\1", 10, token_counts=pack([3, 0])
    )
)

NOT_UTF8 = STEP.replace(b"\xaaStep", b"\xab\x80Step")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_message_is_decoded_or_unreadable(kind: type[Wire]) -> None:
    decoder = Decoder(kind)
    size = len(msgspec.structs.fields(kind))

    def check(data: bytes) -> None:
        try:
            message = decoder.decode(data)
        except UNREADABLE:
            return
        assert decoder.decode(encode(message)) == message

    whole = st.lists(fields, min_size=size, max_size=size).map(lambda given: _encode([kind.__name__, *given]))
    partial = st.lists(fields, max_size=size + 2).map(lambda given: _encode([kind.__name__, *given]))
    fuzz(st.one_of(whole, partial, st.binary(max_size=30)), check, share=1 / len(KINDS))


def test_columns_of_steps_fit_together_or_are_unreadable() -> None:
    """Columns that do not fit together would leave the effects of a step half done."""
    decoder = Decoder(StepOutput)

    def check(data: bytes) -> None:
        try:
            output = decoder.decode(data)
        except UNREADABLE:
            return
        for ready in StepReader().feed(output):
            SequenceMap().apply(ready, 0.0)
        rows = {len(column) for column in (output.sequences, output.starts, output.counts)}
        assert rows == {4 * len(output.finishes)}
        first, more = output.split_tokens()
        assert 4 * len(first) in rows
        assert len(output.tokens) // 4 >= sum(map(len, more.values()))

    built = st.builds(_step, *[columns] * 4, st.binary(max_size=5))
    fuzz(st.one_of(mutated([STEP, MANY]), built), check, known=[_step(pack([1]), b"", b"", b"", b""), NOT_UTF8])


def _step(*given: bytes) -> bytes:
    return _encode(["StepOutput", 1, 0, 1, *given, 10])


def _encode(value: object) -> bytes:
    try:
        return bytes([WIRE_VERSION]) + msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError):
        return b""
