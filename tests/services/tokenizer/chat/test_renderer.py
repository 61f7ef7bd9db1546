import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import psutil
import pytest

from pagewire.services.tokenizer.chat import renderer as renderer_module
from pagewire.services.tokenizer.chat.chat_template import Conversation
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.services.tokenizer.chat.templates import ChatTemplates
from pagewire.services.tokenizer.chat.worker import MEMORY, Answer, Load, Probe
from pagewire.services.tokenizer.chat.worker_process import WorkerProcess
from pagewire.shared.errors import InvalidRequest, Overloaded, Unavailable
from tests.services.tokenizer.chat.conversations import said
from tests.support.waiting import PATIENCE, until

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * (messages | length * 1000000000) }}"
GROWING = "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
SWITCH = "{% if messages[0].content == 'endless' %}" + ENDLESS + "{% else %}{{ messages[0].content }}{% endif %}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a worker are memory and computing time, so other processes on its cores do not end it."""
    monkeypatch.setattr(renderer_module, "ANSWER_WITHIN", PATIENCE)
    monkeypatch.setattr(renderer_module, "START_WITHIN", PATIENCE)


def ask(text: str = "hi") -> Conversation:
    return Conversation([said("user", text)])


@asynccontextmanager
async def rendering(template: str) -> AsyncIterator[ChatRenderer]:
    async with ChatRenderer() as renderer:
        renderer.use(ChatTemplates({"default": template}, {}))
        yield renderer


async def successor(renderer: ChatRenderer, old: int | None) -> int:
    """The next worker that is ready."""
    await until(lambda: renderer.pid not in {None, old})
    assert renderer.pid is not None
    return renderer.pid


def workers() -> list[psutil.Process]:
    """The processes of chat templates that this one has started."""
    running = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if any("chat.worker" in word for word in child.cmdline()):
                running.append(child)
    return running


@pytest.mark.anyio
@pytest.mark.parametrize("hostile", [ENDLESS, HUGE, GROWING], ids=["endless", "huge", "growing"])
async def test_a_template_that_wants_too_much_is_refused(hostile: str) -> None:
    async with rendering(hostile) as renderer:
        for _ in range(2):
            first = await successor(renderer, None)
            with pytest.raises(InvalidRequest, match=r"chat template takes more than 0.5 s or 256 MiB"):
                await renderer.render(ask())
            pid = await successor(renderer, first)
            assert not psutil.pid_exists(first)
            process = psutil.Process(pid)
            before = process.cpu_times()
            assert process.memory_info().rss < MEMORY / 4
            await asyncio.sleep(0.1)  # idle means: no computing time for a while
            assert process.cpu_times().user == before.user


@pytest.mark.anyio
async def test_conversations_behind_a_killed_worker_are_rendered_by_its_successor() -> None:
    async with rendering(SWITCH) as renderer:
        texts = [f"text {number}" for number in range(20)]
        messages = ("first", "endless", *texts, "endless", "last")
        tasks = [asyncio.create_task(renderer.render(ask(text))) for text in messages]
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[1], InvalidRequest)
    assert isinstance(done[-2], InvalidRequest)
    assert [done[0], *done[2:-2], done[-1]] == ["first", *texts, "last"]


@pytest.mark.anyio
async def test_the_loop_runs_on_meanwhile() -> None:
    async with rendering(SWITCH) as renderer:
        await renderer.render(ask())
        turns = 0
        task = asyncio.create_task(renderer.render(ask("endless")))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(InvalidRequest):
            await task
    assert turns > 10


@pytest.mark.anyio
async def test_a_worker_that_is_killed_is_replaced() -> None:
    async with rendering(SWITCH) as renderer:
        pid = await successor(renderer, None)
        for _ in range(2):
            os.kill(pid, signal.SIGKILL)
            assert await renderer.render(ask()) == "hi"
            pid = await successor(renderer, pid)


@pytest.mark.anyio
async def test_a_worker_that_is_killed_at_work_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.services.tokenizer.chat.renderer.ANSWER_WITHIN", 60)
    slow = "{% for i in range(400000 // 10) %}{% for j in range(20) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    async with rendering(slow) as renderer:
        pid = await successor(renderer, None)
        task = asyncio.create_task(renderer.render(ask()))
        used = psutil.Process(pid).cpu_times().user
        await until(lambda: psutil.Process(pid).cpu_times().user > used)
        os.kill(pid, signal.SIGKILL)
        assert await task == "hi"


@pytest.mark.anyio
async def test_a_request_that_is_given_up_does_not_disturb_the_others() -> None:
    async with rendering(SWITCH) as renderer:
        await renderer.render(ask())
        given_up = [asyncio.create_task(renderer.render(ask(text))) for text in ("endless", "a", "b")]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        assert await renderer.render(ask("c")) == "c"
        assert await renderer.render(ask("d")) == "d"


@pytest.mark.anyio
async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "MAX_WAITING", 3)
    async with rendering(SWITCH) as renderer:
        tasks = [asyncio.create_task(renderer.render(ask(str(number)))) for number in range(4)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done[:3] == ["0", "1", "2"]
    assert isinstance(done[3], Overloaded)
    assert done[3].retry_after_ms


@pytest.mark.anyio
async def test_the_templates_own_refusal_is_passed_on() -> None:
    async with rendering("{{ raise_exception('roles must alternate') }}") as renderer:
        with pytest.raises(InvalidRequest, match=r"messages\[0\]: .* refuses this message: roles must alternate"):
            await renderer.render(ask())


@pytest.mark.anyio
@pytest.mark.parametrize(
    "broken",
    [
        "{{ messages[5].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{{ [][3:].pop() }}",
        "{{ {}['key'] }}{{ ''.index('x') }}",
        "{{ '\\ud800' }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ raise_exception('\\ud800') }}",
    ],
)
async def test_a_template_that_fails_is_a_refusal_without_its_insides(broken: str) -> None:
    async with rendering(broken) as renderer:
        first = await successor(renderer, None)
        with pytest.raises(InvalidRequest) as caught:
            await renderer.render(ask())
        assert renderer.pid == first
    message = caught.value.message
    assert re.match(r"messages(\[0\])?: the model's chat template refuses (this message|these messages): .", message)
    assert "Traceback" not in message
    assert "/" not in message


@pytest.mark.anyio
async def test_a_text_beyond_all_prompts_is_refused() -> None:
    async with rendering("{{ messages[0].content * 35000000 }}") as renderer:
        with pytest.raises(InvalidRequest, match="the text has more than"):
            await renderer.render(ask("x"))


@pytest.mark.anyio
async def test_a_model_without_a_template_has_no_worker() -> None:
    async with ChatRenderer() as renderer:
        renderer.use(ChatTemplates({}, {}))
        assert await renderer.rules() == {}
        with pytest.raises(InvalidRequest, match="no chat template: send a prompt"):
            await renderer.render(ask())
        assert renderer.pid is None
        assert workers() == []


@pytest.mark.anyio
@pytest.mark.parametrize("broken", ["{% if %}", "{{ " + "(" * 5000, "{{ 9 ** (9 ** 9) }}"])
async def test_a_broken_template_is_refused_and_not_tried_again(broken: str) -> None:
    async with rendering(broken) as renderer:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="the model's chat template"):
                await renderer.render(ask())
        await until(lambda: workers() == [])
        assert renderer.pid is None


@pytest.mark.anyio
async def test_without_a_worker_process_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", refuse)
        patch.setattr(renderer_module, "RETRY_AFTER", 0.01)
        async with rendering(SWITCH) as renderer:
            with pytest.raises(Unavailable):
                await renderer.render(ask())
            patch.undo()
            await successor(renderer, None)
            assert await renderer.render(ask()) == "hi"


@pytest.mark.anyio
async def test_a_renderer_can_end_at_any_moment() -> None:
    """While a worker starts, works, is replaced; a child that is left would be a warning, which is an error here."""
    for turns in range(60):
        async with rendering(SWITCH) as renderer:
            waiting = asyncio.create_task(renderer.render(ask("endless")))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            if turns % 20 == 0 and renderer.pid is not None:
                os.kill(renderer.pid, signal.SIGKILL)
                await asyncio.sleep(0)
        waiting.cancel()
    gc.collect()
    assert workers() == []


@pytest.mark.anyio
async def test_nothing_is_left_behind() -> None:
    async with rendering(SWITCH) as renderer:
        pid = await successor(renderer, None)
        waiting = asyncio.create_task(renderer.render(ask("endless")))
        await asyncio.sleep(0)
    assert not psutil.pid_exists(pid)
    waiting.cancel()


@pytest.mark.anyio
async def test_a_worker_is_small_and_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_NATS_PASSWORD", "secret")
    async with rendering(SWITCH) as renderer:
        process = psutil.Process(await successor(renderer, None))
        assert "secret" not in "".join(process.environ().values())
        assert not [name for name in process.environ() if name.startswith("PAGEWIRE")]
        assert process.memory_info().rss < 60 << 20
        assert not [region.path for region in process.memory_maps() if "torch" in region.path]
        assert process.num_fds() <= 6


PARENT = """
import asyncio
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.services.tokenizer.chat.templates import ChatTemplates

async def main():
    async with ChatRenderer() as renderer:
        renderer.use(ChatTemplates({"default": "{{ messages }}"}, {}))
        while renderer.pid is None:
            await asyncio.sleep(0.01)
        print(renderer.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_with_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.send_signal(number)
    parent.communicate()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.anyio
async def test_templates_are_probed_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []
    ask_worker = WorkerProcess.ask

    async def ask_and_note(worker: WorkerProcess, message: msgspec.Struct, within: float) -> Answer:
        kinds.append(type(message))
        return await ask_worker(worker, message, within)

    monkeypatch.setattr(WorkerProcess, "ask", ask_and_note)
    late = Conversation([said("user", "a"), said("system", "b")])
    async with rendering(
        "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
        "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    ) as renderer:
        assert not (await renderer.rules())["default"].late_system
        pid = await successor(renderer, None)
        assert await renderer.render(late) == "ba"
        os.kill(pid, signal.SIGKILL)
        await successor(renderer, pid)
        assert await renderer.render(late) == "ba"
    assert kinds.count(Load) == 2
    assert kinds.count(Probe) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("template", [ENDLESS, "{{ (", "{{ messages }} {{ tools }}"])
async def test_the_rules_are_known_whatever_the_template_is(template: str) -> None:
    async with rendering(template) as renderer:
        rules = await renderer.rules()
        assert rules.get("default", MessageRules()) == MessageRules()


@pytest.mark.anyio
async def test_a_refusal_names_the_message() -> None:
    turns = [said("user", "a"), said("assistant", "b")] * 20
    async with rendering(
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ [] + m.role }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    ) as renderer:
        for place in (0, 7, 39):
            messages = [*turns[:place], said("wizard", "x"), *turns[place:]]
            with pytest.raises(
                InvalidRequest, match=rf"^messages\[{place}\]: .*refuses this message: TypeError: can only"
            ):
                await renderer.render(Conversation(messages))
