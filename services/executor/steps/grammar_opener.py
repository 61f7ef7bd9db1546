"""Opens the grammars of new sequences on its own thread: compiles them, and has them consume the tokens so far."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
from llguidance import LLMatcher

from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.services.executor.steps.packed_columns import column
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.grammar_compiler import GrammarCompiler, GrammarError
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import AddSlot
from pagewire.shared.sampling_parameters import is_penalized, unpack_record

_log = structlog.get_logger()


class GrammarOpener:
    """Opens grammars for the tokenizer of one model, one after the other."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "grammar")

    def open(self, added: AddSlot, opened: Callable[[], None], on_limit: Callable[[], None]) -> SequenceGrammar:
        """Returns the grammar of a sequence that has one. When it is ready, `opened` is called on another thread.
        `on_limit` is called before the end of a step in which the grammar goes beyond a limit, on any thread."""
        output = column(added.tokens)[added.prompt_tokens :].tolist()
        sampling = added.sampling
        # Tokens that are not sampled have no log-probabilities, and the sampler does not count them for penalties.
        forces = sampling.logprobs < 0 and not is_penalized(unpack_record(sampling.record))
        grammar = SequenceGrammar(
            output,
            sampling.min_tokens,
            unpack(sampling.stop_ids),
            sampling.max_tokens,
            partial(self._matcher, sampling.grammar),
            on_limit,
            forces=forces,
        )

        def start() -> None:
            try:
                grammar.start()
            finally:
                opened()

        self._thread.submit(start)
        return grammar

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, text: str, output: Sequence[int], *, fresh: bool) -> LLMatcher | None:
        try:
            matcher = self._compiler.compile(text, fresh=fresh)
        except (GrammarError, ConfigurationError) as error:
            _log.warning("grammar_not_compiled", reason=str(error))
            return None
        if output:
            matcher.consume_tokens(list(output))
        return matcher
