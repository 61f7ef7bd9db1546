import struct

import msgspec
from tokenizers import Tokenizer, decoders, models

from pagewire.services.detokenizer.frames.last_frame import spelled
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.services.gateway.answers.logprobs import chat_logprobs
from pagewire.shared.messages import pack
from pagewire.shared.messages.done import ReportedLogprobs


def test_a_token_with_a_part_of_a_character_shows_its_bytes() -> None:
    tokenizer = Tokenizer(models.BPE({"Ã": 0, "©": 1, "!": 2}, []))  # the bytes of é, as byte-level BPE spells them
    tokenizer.decoder = decoders.ByteLevel()
    reported = ReportedLogprobs(1, pack([0, 2]), struct.pack("<2f", -0.5, -1.0))
    logprobs = spelled(reported, Vocabulary(tokenizer).spell)
    assert msgspec.to_builtins(logprobs) == {
        0: {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd", "bytes": [0xC3]},
        2: {"logprob": -1.0, "rank": 1, "decoded_token": "!"},
    }
    shown = chat_logprobs([logprobs], 2).content[0]
    assert (shown.token, shown.bytes) == ("\ufffd", [0xC3])
