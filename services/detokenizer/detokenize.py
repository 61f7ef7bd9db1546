"""The verb `detokenize`: token ids in, text out, as `tokenize` has it the other way round."""

import asyncio

from tokenizers import Tokenizer

from pagewire.services.detokenizer.inboxes import Inboxes
from pagewire.services.detokenizer.lookups import Lookups
from pagewire.services.tokenizer.answers import Answers
from pagewire.services.tokenizer.decode import decode, encoding_of
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import InvalidRequest, Overloaded
from pagewire.shared.messages.client import DetokenizeReply, DetokenizeRequest

MAX_ID = 0xFFFF_FFFE
RETRY_AFTER_MS = 500


class Detokenize:
    """Answers `pagewire.v1.detokenize.<model>`."""

    def __init__(self, bus: Bus, tokenizer: Tokenizer, inboxes: Inboxes, lookups: Lookups) -> None:
        self._tokenizer = tokenizer
        self._answers = Answers(bus)
        self._inboxes = inboxes
        self._lookups = lookups
        self._prefix = tokenizer.encode("").ids

    def on_request(self, message: Message) -> None:
        """Handler of the subject."""
        if not self._inboxes.accept(message.reply):
            return
        try:
            request = decode(message.data, DetokenizeRequest, encoding_of(message.headers))
            if not all(0 <= token <= MAX_ID for token in request.token_ids):
                raise InvalidRequest("token_ids holds a number that cannot be a token id")
            if self._lookups.full:
                raise Overloaded("too many requests at once: send it again later", RETRY_AFTER_MS)
        except (InvalidRequest, Overloaded) as error:
            self._answers.refuse(message, error)
        else:
            self._lookups.start(self._answer(message, request.token_ids))

    async def _answer(self, message: Message, tokens: list[int]) -> None:
        """Special tokens are spelled out, but for those that `tokenize` puts around every text."""
        if self._prefix and tokens[: len(self._prefix)] == self._prefix:
            tokens = tokens[len(self._prefix) :]
        text = await asyncio.to_thread(self._tokenizer.decode, tokens, skip_special_tokens=False)
        self._answers.send(message, DetokenizeReply(text))
