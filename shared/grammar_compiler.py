"""Compiles grammars for a model's tokens, with llguidance.

A grammar travels as llguidance's own text: Lark, or JSON with the key `grammars`. The tokenizer service compiles it to
refuse what cannot be compiled, the executor to follow it token by token.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future

import llguidance
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from pagewire.shared.errors import PagewireError
from pagewire.shared.grammar_limits import MAX_LEXER_STATES, MAX_LEXER_STEPS, MAX_PARSER_ITEMS

MAX_GRAMMAR = 128 * 1024
"""Maximum characters of a grammar."""
MAX_COMPILED = 256
"""Maximum number of compiled grammars that are kept."""
MAX_COMPILED_CHARACTERS = 4 << 20
"""Maximum characters of all kept grammars. The length and `LIMITS` bound the memory of a compiled grammar."""
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=MAX_LEXER_STEPS,
    step_max_items=MAX_PARSER_ITEMS,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Bounds of a grammar's time and memory. A grammar that exceeds one is refused, or ends its request with an error."""
STACK = 256 << 20
"""Bytes of stack for compiling: the library recurses along chains of rules. Unused bytes take no memory."""
_creating = threading.Lock()
"""Held while a thread with a deep stack is created: the size of new stacks is one for the whole process."""


class GrammarError(PagewireError):
    """A grammar cannot be compiled, or not for this tokenizer; the message is the library's reason."""


class GrammarCompiler:
    """Compiles grammars for the tokens of one model, and keeps the compiled ones.

    Any thread may use it. When several threads need the same grammar at once, one compiles it and the others wait. The
    first use loads the tokenizer and prepares its tokens, which takes a third of a second.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int, eos: Collection[int]) -> None:
        """`load` returns the tokenizer; `vocab_size` is the model's; the tokens `eos` end a text."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos = sorted(eos)
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher | str]] = OrderedDict()
        self._characters = 0
        self._preparing = threading.Lock()
        self._keeping = threading.Lock()

    def compile(self, grammar: str, *, fresh: bool = False) -> LLMatcher:
        """Returns a matcher at the beginning of the text. Releases the interpreter lock while it compiles.

        The matchers of a grammar share their lexer, and with it the limit of its states. A `fresh` one has a new lexer,
        which later matchers share.

        Raises:
            GrammarError: the grammar or the tokenizer does not allow it.
        """
        with self._keeping:
            if fresh and self._compiled.pop(grammar, None) is not None:
                self._characters -= len(grammar)
            compiled = self._compiled.get(grammar)
            is_new = compiled is None
            if compiled is None:
                compiled = self._compiled[grammar] = Future()
                self._characters += len(grammar)
                self._drop_oldest()
            else:
                self._compiled.move_to_end(grammar)
        if is_new:
            self._complete(grammar, compiled)
        matcher = compiled.result()
        if isinstance(matcher, str):
            raise GrammarError(matcher)
        return matcher.deep_copy()

    def _complete(self, grammar: str, compiled: "Future[LLMatcher | str]") -> None:
        """Compiles a grammar that others may wait for."""
        try:
            compiled.set_result(self._compile(grammar))
        except BaseException as error:
            compiled.set_exception(error)
            with self._keeping:
                if self._compiled.get(grammar) is compiled:
                    del self._compiled[grammar]
                    self._characters -= len(grammar)
            raise

    def _compile(self, grammar: str) -> LLMatcher | str:
        """Returns a matcher, or the reason why there is none."""
        try:
            tokens = self._prepared()
        except ValueError as error:
            return f"the model's tokenizer does not support grammars: {error}"
        matchers: list[LLMatcher] = []

        def work() -> None:
            matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
            trial = matcher if matcher.is_error() else matcher.deep_copy()
            if not matcher.is_error():
                trial.compute_bitmask()  # the first mask meets limits that compiling does not
            matchers.append(trial if trial.is_error() else matcher)

        _run_deep(work)
        return matchers[0].get_error() or matchers[0]

    def _drop_oldest(self) -> None:
        while len(self._compiled) > MAX_COMPILED or self._characters > MAX_COMPILED_CHARACTERS:
            dropped, _ = self._compiled.popitem(last=False)
            self._characters -= len(dropped)

    def _prepared(self) -> LLTokenizer:
        with self._preparing:
            if self._tokens is None:
                eos = self._eos or None
                self._tokens = LLTokenizer(self._load().to_str(), n_vocab=self._vocab_size, eos_token=eos)
            return self._tokens


def _run_deep(work: Callable[[], None]) -> None:
    """Runs `work` on a thread with a deep stack."""
    with _creating:
        usual = threading.stack_size(STACK)
        thread = threading.Thread(target=work, name="compile")
        thread.start()
        threading.stack_size(usual)
    thread.join()
