"""Renders conversations one by one in a worker process, and replaces a worker that has ended or hangs."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import structlog

from pagewire.services.tokenizer.chat.chat_template import Conversation
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.services.tokenizer.chat.templates import ChatTemplates
from pagewire.services.tokenizer.chat.worker import CPU_SECONDS, MEMORY, Answer, Job, Load, Probe
from pagewire.services.tokenizer.chat.worker_process import WorkerDied, WorkerProcess, worker_process
from pagewire.shared.errors import InvalidRequest, Overloaded, RequestError, Unavailable

ANSWER_WITHIN = 0.8
"""Timeout of an answer, in seconds without those in which the worker waits for a core: more than `CPU_SECONDS`."""
START_WITHIN = 10.0
"""Timeout of compiling the templates, in seconds without those in which the worker waits for a core."""
RETRY_AFTER = 1.0
"""Seconds between attempts to start a worker."""
MAX_WAITING = 1024
"""Maximum number of waiting conversations."""
ATTEMPTS = 2
"""Attempts to render a conversation when workers are killed from outside."""

_TOO_MUCH = f"the model's chat template takes more than {CPU_SECONDS} s or {MEMORY >> 20} MiB"
_log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A conversation that waits to be rendered."""

    job: Job
    answer: "asyncio.Future[Answer]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    attempts: int = 0
    """Number of workers that have begun to render it."""


class ChatRenderer:
    """`async with ChatRenderer() as renderer: renderer.use(templates); text = await renderer.render(conversation)`.

    A worker starts at once, while the model is read.

    Attributes:
        pid: process id of the worker; None while no worker is ready, and for a model without a template.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self._templates = ChatTemplates({}, {})
        self._read = asyncio.Event()
        """Set when the templates are known."""
        self._waiting: deque[_Waiting] = deque()
        """Conversations in order; the worker renders the first one."""
        self._changed = asyncio.Event()
        """Set when a conversation is added or the worker has ended."""
        self._rules: dict[str, MessageRules] = {}
        """Rules of the templates, by name: they are probed once."""
        self._probed = asyncio.Event()
        """Set when the rules are known, or the templates turn out to be unusable."""
        self._broken = ""
        """Reason why the templates can never be used; empty: they can."""
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def use(self, templates: ChatTemplates) -> None:
        """Renders by these templates from now on. A model without a template needs no worker."""
        self._templates = templates
        self._read.set()

    async def rules(self) -> Mapping[str, MessageRules]:
        """Returns the rules of the templates by name, once a worker has probed them; none for unusable templates."""
        await self._probed.wait()
        return self._rules

    async def render(self, conversation: Conversation) -> str:
        """Returns the text for the model to continue, special tokens included.

        Raises:
            InvalidRequest: the model has no template, or the template refuses this conversation: the error names the
                message.
            Overloaded: too many conversations wait.
            Unavailable: no worker can be started.
        """
        template = self._templates.choose(tools=conversation.tools is not None)
        if template is None:
            raise InvalidRequest("this model has no chat template: send a prompt instead of messages")
        if self._broken:
            raise InvalidRequest(self._broken)
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("too many conversations wait: send the request again later", 1000)
        waiting = _Waiting(Job(template, conversation))
        self._waiting.append(waiting)
        self._changed.set()
        answer = await waiting.answer
        if answer.refusal:
            raise InvalidRequest(_refusal(answer), field="messages")
        return answer.text

    async def _run(self) -> None:
        """Keeps a worker running, unless the templates turn out to be unusable."""
        while not self._broken:
            try:
                async with worker_process(self._changed.set) as worker:
                    await self._read.wait()
                    if not self._templates.named:
                        break
                    if await self._load(worker):
                        self.pid = worker.pid
                        await self._serve(worker)
            except (OSError, TimeoutError, WorkerDied) as error:
                _log.error("chat_worker_not_started", reason=repr(error))
                self._refuse_all(Unavailable("chat templates cannot be rendered now: send the request again", 1000))
                await asyncio.sleep(RETRY_AFTER)
            finally:
                self.pid = None
        self._probed.set()
        if self._broken:
            _log.warning("chat_template_unusable", reason=self._broken)
            self._refuse_all(InvalidRequest(self._broken))

    async def _load(self, worker: WorkerProcess) -> bool:
        """Lets the worker compile and probe the templates; returns whether it can render them. If no worker can, the
        reason is recorded."""
        try:
            answer = await worker.ask(Load(self._templates.named, self._templates.special, self._rules), START_WITHIN)
        except WorkerDied as error:
            if not error.by_limit:
                raise
            self._broken = f"{_TOO_MUCH} to be compiled"
        else:
            if answer.refusal:
                self._broken = f"the model's chat template is no template: {answer.refusal}"
        return not self._broken and await self._probe(worker)

    async def _probe(self, worker: WorkerProcess) -> bool:
        """Finds the rules of templates that no worker has probed; returns whether the worker still runs.

        A template that exceeds a limit even with small conversations gets the default rules."""
        for name in self._templates.named.keys() - self._rules.keys():
            try:
                answer = await worker.ask(Probe(name), START_WITHIN)
            except WorkerDied as error:
                if not error.by_limit:
                    raise
                self._rules[name] = MessageRules()
                return False
            self._rules[name] = answer.rules or MessageRules()
        self._probed.set()
        return True

    async def _serve(self, worker: WorkerProcess) -> None:
        """Renders waiting conversations until the worker ends or does not answer."""
        while worker.alive:
            if not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            first = self._waiting[0]
            if not first.answer.done():  # done if the request was cancelled
                first.attempts += 1
                try:
                    answer = await worker.ask(first.job, ANSWER_WITHIN)
                except (TimeoutError, WorkerDied) as error:
                    if first.attempts < ATTEMPTS and isinstance(error, WorkerDied) and not error.by_limit:
                        return  # the worker was killed from outside: the next one retries this conversation
                    self._refuse_first(InvalidRequest(f"{_TOO_MUCH} for these messages"))
                    return
                if not first.answer.done():
                    first.answer.set_result(answer)
            self._waiting.popleft()

    def _refuse_first(self, error: RequestError) -> None:
        first = self._waiting.popleft()
        if not first.answer.done():
            first.answer.set_exception(error)

    def _refuse_all(self, error: RequestError) -> None:
        while self._waiting:
            self._refuse_first(error)


def _refusal(answer: Answer) -> str:
    if answer.refused is None:
        return f"messages: the model's chat template refuses these messages: {answer.refusal}"
    return f"messages[{answer.refused}]: the model's chat template refuses this message: {answer.refusal}"
