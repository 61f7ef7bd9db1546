"""Streams through everything that may happen to them: repeated requests, cancels, and changes of scheduler."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.services.detokenizer.adopter import Adopter
from pagewire.services.detokenizer.client_handlers import OTHERS_ANSWER_WITHIN
from pagewire.services.detokenizer.streams import MAX_LOST_SCHEDULERS
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker
from pagewire.shared.client_protocol.frame_encoding import encode_frame
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.attach import Attached, AttachState
from pagewire.shared.messages.client import Accepted, CancelReply
from pagewire.shared.messages.open import AbortStream, Encoding, OpenState, StoredWork
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from tests.services.detokenizer.rig import END, HELLO, KEY, PROMPT, Rig, finish_hello, ids, rig, step_of
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class TestFramesThatComeAgain:
    """They are equal to the letter, whoever asks and whenever."""

    @pytest.mark.parametrize("encoding", Encoding)
    async def test_a_second_reader_gets_the_frames_of_the_first_from_the_beginning(
        self, folder: Path, encoding: Encoding
    ) -> None:
        async with rig(folder) as world:
            first = await world.open(encoding, stop=("again?", "!"))
            await world.attach()
            world.generate(HELLO[:4])
            await until(lambda: len(first.deltas) == 4)
            second = await world.reader(encoding)
            assert await world.open_for(second, encoding=encoding, stop=("again?", "!")) == OpenState.ATTACHED
            world.generate(HELLO[4:], start=4)
            await first.end()
            await second.end()
            assert first.bodies == second.bodies

    @pytest.mark.parametrize("running", [True, False])
    async def test_a_resumption_repeats_the_frames_from_any_position(self, folder: Path, running: bool) -> None:
        async with rig(folder) as world:
            first = await world.open()
            await world.attach()
            world.generate(HELLO[:-1])
            if not running:
                world.generate(HELLO[-1:], Finish.LENGTH, start=len(HELLO) - 1)
                await first.end()
            resumed = [await world.resume(first.accepted.resume, start) for start in range(len(HELLO) + 1)]
            if running:
                world.generate(HELLO[-1:], Finish.LENGTH, start=len(HELLO) - 1)
                await first.end()
            for start, reader in enumerate(resumed):
                await reader.end()
                assert reader.bodies == first.bodies[1 + start :]

    async def test_a_repeated_request_from_one_inbox_repeats_its_frames(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.generate(HELLO[:3])
            await until(lambda: len(reader.deltas) == 3)
            bodies = list(reader.bodies)
            assert await world.open_for(reader) == OpenState.ATTACHED
            await until(lambda: len(reader.deltas) == 6)
            assert reader.bodies == bodies * 2
            world.client.publish(reader.accepted.resume, b'{"start": 2}', reply=reader.inbox)
            await until(lambda: len(reader.deltas) == 7)
            world.generate(HELLO[3:], Finish.LENGTH, start=3)
            await reader.end()
            assert sum(d.start == 3 for d in reader.deltas) == 1

    async def test_a_restarted_detokenizer_repeats_the_frames_from_the_record(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as world:
            first = await world.open(stop=("!",))
            await world.attach()
            world.generate(HELLO)
            await first.end()
        async with rig(folder, broker=broker) as world:
            second = await world.reader()
            assert await world.open_for(second, stop=("!",)) == OpenState.ATTACHED
            await second.end()
            assert second.bodies == first.bodies
            whole = await world.reader()
            assert await world.open_for(whole, stream=False) == OpenState.ATTACHED
            assert (await whole.result()).choices[0].text == first.text()


class TestDuplicates:
    """A request id that arrives again, from the same or another client."""

    async def test_another_body_under_a_known_id_is_a_conflict(self, folder: Path) -> None:
        async with rig(folder) as world:
            await world.open()
            other = await world.reader()
            assert await world.open_for(other, digest=b"other") == OpenState.CONFLICT
            await finish_hello(world)
            assert await world.open_for(other, digest=b"other") == OpenState.CONFLICT
            assert other.messages == []

    async def test_a_tokenizer_that_missed_the_answer_may_store_the_work(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(stored=False)
            assert await world.open_for(reader) == OpenState.WAITING
            await world.ask("stored", StoredWork("r1", 1))
            assert await world.open_for(reader) == OpenState.ATTACHED, "it would be stored twice"

    async def test_an_attempt_that_fails_does_not_end_what_an_earlier_one_has_stored(self, folder: Path) -> None:
        async with rig(folder) as world:
            first, unstored = await world.open(), await world.open(stored=False, request_id="r2")
            for request_id in ("r1", "r2"):
                await world.ask(
                    "abort", AbortStream(request_id, "unavailable", "the store is full", unless_accepted=True)
                )
            assert (await unstored.error()).code == 503
            assert len(unstored.frames) == 1, "a request that is refused was not accepted before"
            await finish_hello(world)
            await first.end()

    async def test_a_request_that_is_not_admitted_is_attached_to_if_it_is_known(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.reader()
            assert await world.open_for(reader, joins=True) == OpenState.ABSENT
            assert not reader.messages
            first = await world.open()
            assert await world.open_for(reader, joins=True) == OpenState.ATTACHED
            await finish_hello(world)
            await first.end()
            await reader.end()
            assert reader.bodies == first.bodies

    async def test_equal_requests_at_one_moment_share_one_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            readers = [await world.reader() for _ in range(8)]
            states = await asyncio.gather(*(world.open_for(reader) for reader in readers))
            assert sorted(states) == [OpenState.OPENED] + [OpenState.ATTACHED] * 7
            await finish_hello(world)
            for reader in readers:
                await reader.end()
                assert reader.bodies == readers[0].bodies

    async def test_the_readers_of_a_stream_are_bounded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pagewire.services.detokenizer.streams.MAX_SUBSCRIBERS", 3)

        async with rig(folder) as world:
            readers = [await world.open()]
            for _ in range(3):
                readers.append(await world.reader())
                await world.open_for(readers[-1])
            await finish_hello(world)
            for reader in readers[1:]:
                await reader.end()
            assert not readers[0].deltas


class TestCancel:
    """Before the request is admitted, while it runs, and after its end."""

    async def test_a_cancel_before_the_admission_ends_the_request(self, folder: Path) -> None:
        async with rig(folder) as world:
            ack = await world.store_item()
            reader = await world.open()
            assert await world.cancel(reader.accepted.cancel) == "cancelled"
            final = await reader.end()
            assert final.choices[0].finish_reason == "cancelled"
            assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (5, 0)
            attached = await world.attach(ack=ack)
            assert attached.state == AttachState.ENDED
            await until(lambda: world.ended_items == [ack])
            assert world.aborted == []

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_cancel_ends_a_running_request_with_its_text_so_far(self, folder: Path, stream: bool) -> None:
        async with rig(folder) as world:
            ack = await world.store_item()
            reader = await world.open(stream=stream, n=2, stop=(" world,",))
            await world.attach(([], []), ack=ack)
            world.step((100, 0, HELLO[0], Finish.LENGTH), (101, 0, HELLO[0], Finish.NONE))
            world.step((101, 1, HELLO[1], Finish.NONE))
            await until(lambda: world.load["tokens"] == 3)
            assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "cancelled"
            world.step((101, 2, HELLO[2], Finish.NONE))
            if stream:
                final = await reader.end()
                assert [c.finish_reason for c in final.choices] == ["length", "cancelled"]
                assert reader.text(1) == "Hello"
                usage = final.usage
            else:
                result = await reader.result()
                assert [c.text for c in result.choices] == ["Hello", "Hello"]
                assert result.choices[1].token_ids == HELLO[:2]
                usage = result.usage
            assert usage.completion_tokens == 3
            await until(lambda: world.aborted)
            assert world.aborted == [([101], AbortReason.CANCELLED)]
            assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "ended"
            await until(lambda: world.ended_items == [ack])

    async def test_a_cancel_of_an_ended_or_unknown_request_says_so(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as world:
            await world.open()
            await finish_hello(world)
            assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "ended"
            assert await world.cancel(f"{subjects.CANCEL}.d1.r2.{KEY}") == "unknown"
        async with rig(folder, broker=broker) as world:
            assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "ended"

    async def test_a_cancel_may_be_published_and_may_name_the_id_alone(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            world.client.publish(reader.accepted.cancel, b"")
            assert (await reader.end()).choices[0].finish_reason == "cancelled"
            other = await world.open(request_id="r2")
            assert await world.cancel(f"{subjects.CANCEL}.r2") == "cancelled"
            await other.end()
            assert await world.cancel(f"{subjects.CANCEL}.r2") == "ended"
            assert await world.cancel(f"{subjects.CANCEL}.r3") == "unknown"

    async def test_a_cancel_by_id_waits_for_an_owner_that_is_first_in_rank(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Adopter, "is_first", lambda _, name: name != "elsewhere")
        async with rig(folder) as world:
            loop = asyncio.get_running_loop()

            def answer_late(message: Message) -> None:
                state = encode_frame(CancelReply("cancelled"), Encoding.JSON)
                loop.call_later(2 * OTHERS_ANSWER_WITHIN, world.bus.publish, message.reply, state)

            await world.bus.subscribe(f"{subjects.CANCEL}.elsewhere", answer_late)
            assert await world.cancel(f"{subjects.CANCEL}.elsewhere") == "cancelled"
            assert await world.cancel(f"{subjects.CANCEL}.nowhere") == "unknown"

    async def test_a_lost_scheduler_delays_no_cancel(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach(scheduler="gone")
            assert await world.cancel(reader.accepted.cancel) == "cancelled"
            await reader.end()


class TestAttachment:
    """Schedulers come and go; the longer list of known tokens wins."""

    async def test_tokens_that_only_the_scheduler_knows_reach_the_client(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.generate(HELLO[:2])
            await until(lambda: len(reader.deltas) == 2)
            answer = await world.attach((HELLO[:5],), term=2, first_sequence=1)
            assert [unpack(tokens) for tokens in answer.tokens] == [HELLO[:5]]
            assert (answer.state, answer.ended) == (AttachState.OPEN, b"")
            for position, token in enumerate(HELLO[5:], 5):
                last = Finish.LENGTH if position == len(HELLO) - 1 else Finish.NONE
                world.step((1, position, token, last), term=2, step=position - 5)
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO
            assert reader.text() == "Hello world, and 🦙 again!"

    async def test_tokens_that_only_the_detokenizer_knows_reach_the_scheduler(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.generate(HELLO[:4])
            await until(lambda: len(reader.deltas) == 4)
            other = [0, 0]
            answer = await world.attach((other,), term=2, first_sequence=1)
            assert unpack(answer.tokens[0]) == HELLO[:4]
            world.step((1, 3, 0, Finish.NONE), term=2, step=0)
            world.step((1, 4, HELLO[4], Finish.LENGTH), term=2, step=1)
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:5]

    async def test_an_attachment_names_the_completions_that_have_ended(self, folder: Path) -> None:
        async with rig(folder) as world:
            await world.open(n=3, stop=("!",))
            await world.attach(([], [], []))
            world.step((100, 0, ids("!")[0], Finish.NONE), (101, 0, END, Finish.STOP), (102, 0, 5, Finish.NONE))
            answer = await world.attach(([], [], []), term=2)
            assert unpack(answer.ended) == [0, 1]
            assert answer.state == AttachState.OPEN

    async def test_an_end_that_only_the_scheduler_has_seen_ends_the_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            ack = await world.store_item()
            reader = await world.open()
            await world.attach()
            answer = await world.attach(([*HELLO, END],), term=2, finishes=bytes([Finish.STOP]), ack=ack)
            assert answer.state == AttachState.ENDED
            final = await reader.end()
            assert final.choices[0].finish_reason == "stop"
            assert final.usage.completion_tokens == len(HELLO) + 1
            await until(lambda: world.ended_items == [ack])

    @pytest.mark.parametrize("missed", [False, True])
    @pytest.mark.parametrize(
        ("finish", "code", "kind", "reason"),
        [
            (Finish.NOT_FINITE, 500, "internal", "NaN"),
            (Finish.GRAMMAR_LIMIT, 400, "invalid_request", "50,000 states"),
            (Finish.ADAPTER_LOST, 503, "unavailable", "adapter sql cannot be loaded"),
        ],
    )
    async def test_a_sequence_without_a_next_token_ends_the_request(
        self, folder: Path, missed: bool, finish: Finish, code: int, kind: str, reason: str
    ) -> None:
        async with rig(folder) as world:
            reader = await world.open(n=2, adapter="sql")
            await world.attach(([], []))
            world.generate(HELLO[:1])
            if missed:
                answer = await world.attach((HELLO[:2], HELLO[:1]), term=2, finishes=bytes([finish, Finish.NONE]))
                assert answer.state == AttachState.ENDED
            else:
                world.step((101, 0, NO_TOKEN, finish))
            error = await reader.error()
            assert (error.code, error.error, error.tokens_emitted) == (code, kind, 3 if missed else 1)
            assert reason in error.message
            await until(lambda: world.aborted)
            assert world.aborted == [([100, 101], AbortReason.CANCELLED)]

    async def test_tokens_before_the_one_that_failed_are_sent(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.publish(step_of(HELLO[:2], Finish.GRAMMAR_LIMIT))
            assert (await reader.error()).tokens_emitted == 2
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:2]

    async def test_a_stop_string_before_the_token_that_failed_ends_the_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(stop=("world",))
            await world.attach()
            world.publish(step_of(HELLO[:2], Finish.NOT_FINITE))
            assert (await reader.end()).choices[0].stop_reason == "world"

    async def test_the_drafts_of_a_step_that_comes_again_count_once(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            for step in range(2):
                world.publish(step_of(HELLO[:3], step=step, accepted=2))
            world.publish(step_of(HELLO[3:], Finish.LENGTH, step=2, start=3))
            metrics = (await reader.end()).metrics
            assert metrics is not None
            drafts = metrics.speculative_decoding
            assert drafts
            assert (drafts.num_draft_tokens, drafts.num_accepted_draft_tokens) == (2, 2)

    async def test_a_stop_string_in_tokens_of_the_scheduler_ends_the_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(stop=("world",))
            answer = await world.attach((HELLO,))
            assert answer.state == AttachState.ENDED
            assert (await reader.end()).choices[0].stop_reason == "world"
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:2]

    async def test_rows_of_an_older_attachment_are_ignored(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            await world.attach(term=2, generation=2, first_sequence=1, executor="e2")
            world.step((100, 0, HELLO[0], Finish.LENGTH), term=1)
            world.step((1, 0, HELLO[0], Finish.NONE), term=2, step=0, executor="e2")
            assert (await world.attach(term=1, generation=1)).state == AttachState.STALE
            world.step((1, 1, HELLO[1], Finish.LENGTH), term=2, step=1, executor="e2")
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:2]

    async def test_a_scheduler_learns_that_another_one_has_its_request(self, folder: Path) -> None:
        """A frozen scheduler that wakes would go on with sequences that nobody needs."""

        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            await world.attach(term=2, generation=1)
            await world.attach(term=3, generation=2, scheduler="s2", first_sequence=1, executor="e2")
            await until(lambda: world.aborted == [([100], AbortReason.SUPERSEDED)])
            world.step((1, 0, HELLO[0], Finish.LENGTH), term=3, step=0, executor="e2")
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:1]

    async def test_live_schedulers_may_take_a_request_from_each_other(self, folder: Path) -> None:
        """On a starved machine items are renewed too late."""
        async with rig(folder) as world:
            await world.open()
            for turn in range(2 * MAX_LOST_SCHEDULERS):
                scheduler = f"s{turn % 2}"
                world.scheduler_beat(scheduler)
                assert (await attach_at(world, turn, scheduler)).state == AttachState.OPEN

    async def test_schedulers_may_hand_a_request_on_and_drain(self, folder: Path) -> None:
        async with rig(folder) as world:
            await world.open()
            for turn in range(2 * MAX_LOST_SCHEDULERS):
                assert (await attach_at(world, turn, f"s{turn}")).state == AttachState.OPEN
                world.scheduler_ended(f"s{turn - 1}")
                world.scheduler_beat(f"s{turn}", draining=True)

    async def test_tokens_from_before_a_preemption_are_kept(self, folder: Path) -> None:
        """The sequence goes on in the same attachment: what is computed again comes at positions that are known."""

        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.generate(HELLO[:3])
            world.generate([HELLO[3]], start=3)
            world.step((100, 3, 0, Finish.NONE))
            world.generate(HELLO[4:], Finish.LENGTH, start=4)
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO

    async def test_a_request_that_has_ended_is_not_generated_again(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as world:
            await world.open()
            await finish_hello(world)
            ack = await world.store_item()
            assert (await world.attach(ack=ack)).state == AttachState.ENDED
            await until(lambda: ack in world.ended_items)
        async with rig(folder, broker=broker) as world:
            ack = await world.store_item()
            answer = await world.attach(ack=ack)
            assert answer.state == AttachState.ENDED
            assert unpack(answer.tokens[0]) == HELLO
            await until(lambda: ack in world.ended_items)

    async def test_a_record_is_looked_for_unless_the_id_is_fresh(self, folder: Path) -> None:
        async with rig(folder) as world:
            looked_for: list[str] = []

            async def get_done(request_id: str) -> bytes | None:
                looked_for.append(request_id)
                return None

            world.broker.store.get_done = get_done  # type: ignore[method-assign]
            reader = await world.open(fresh=True)
            assert await world.open_for(reader, fresh=True, digest=b"another") == OpenState.CONFLICT
            assert looked_for == []
            await world.open(request_id="r2")
            assert looked_for == ["r2"]

    async def test_an_attach_without_an_opened_stream_is_unknown(self, folder: Path) -> None:
        async with rig(folder) as world:
            assert (await world.attach()).state == AttachState.UNKNOWN


async def attach_at(world: Rig, turn: int, scheduler: str) -> Attached:
    """Another scheduler attaches the request, under a term of its own."""
    await world.bus.flush()
    return await world.attach(term=1 + turn, generation=1 + turn, scheduler=scheduler)


def reported(*tokens: tuple[int, int, int]) -> dict[str, Any]:
    """Columns of a step that reports (sequence, position in the sequence, token), each with a second best token."""
    return {
        "logprob_tokens": pack(number for sequence, position, _ in tokens for number in (sequence, position, 2)),
        "logprob_ranks": pack(1 for _ in tokens),
        "logprob_ids": pack(number for _, _, token in tokens for number in (token, token + 1)),
        "logprob_values": np.array([-0.5 - i / 4 for i in range(2 * len(tokens))], "<f4").tobytes(),
    }


async def test_a_client_hears_nothing_before_the_queue_has_its_request(folder: Path) -> None:
    """So it sends the request again if the tokenizer dies before it has stored it."""
    async with rig(folder) as world:
        reader = await world.open(stored=False)
        world.service._streams.keep_alive()
        assert reader.messages == []
        assert await world.open_for(reader, stored=False) == OpenState.WAITING
        assert reader.messages == []
        await world.ask("stored", StoredWork("r1"))
        assert [type(frame) for frame in reader.frames] == [Accepted]
        other = await world.open(request_id="r2", stored=False)
        await world.attach(request_id="r2")
        assert [type(frame) for frame in other.frames] == [Accepted]


class TestLogprobs:
    """They stand beside their tokens from the step to the record."""

    async def test_log_probabilities_come_with_their_tokens_and_from_the_record(self, folder: Path) -> None:
        broker = MemoryBroker()
        fields: dict[str, Any] = {"logprobs": True, "prompt_logprobs": True, "prompts": (pack([9] * PROMPT),)}
        async with rig(folder, broker=broker) as world:
            first = await world.open(**fields)
            await world.attach()
            prompt = [(100, position, 9) for position in range(1, PROMPT)]
            world.publish(step_output(0, reported(*prompt)))
            world.publish(step_output(1, reported(*prompt[:2])))  # computed again after a preemption
            for position, token in enumerate(HELLO):
                finish = Finish.LENGTH if position == len(HELLO) - 1 else Finish.NONE
                row = (100, PROMPT + position, token)
                world.publish(step_output(2 + position, reported(row), row, finish))
            final = await first.end()
            assert [list(delta.logprobs[0]) for delta in first.deltas if delta.logprobs] == [[t, t + 1] for t in HELLO]
            assert first.deltas[0].logprobs is not None
            best, second = first.deltas[0].logprobs[0].values()
            assert (best.logprob, best.rank, second.logprob, second.rank) == (-0.5, 1, -0.75, 1)
            assert final.prompt_token_ids == [[9] * PROMPT]
            assert final.prompt_logprobs is not None
            assert [logprobs and list(logprobs) for logprobs in final.prompt_logprobs[0]] == [
                None,
                *[[9, 10]] * (PROMPT - 1),
            ]
        async with rig(folder, broker=broker) as world:
            again = await world.reader()
            assert await world.open_for(again, **fields) == OpenState.ATTACHED
            await again.end()
            assert again.bodies == first.bodies
            whole = await world.reader()
            assert await world.open_for(whole, stream=False, **fields) == OpenState.ATTACHED
            assert [list(logprobs) for logprobs in (await whole.result()).choices[0].logprobs or ()] == [
                [t, t + 1] for t in HELLO
            ]

    async def test_a_frame_that_is_too_large_ends_its_stream_alone(self, folder: Path) -> None:
        """Spelled out, log-probabilities take more than the tokenizer has estimated."""
        length = 400
        fields: dict[str, Any] = {"prompt_lengths": pack([length]), "prompts": (pack([9] * length),)}
        async with rig(folder, broker=MemoryBroker(max_payload=1 << 15)) as world:
            reader, other = await world.open(prompt_logprobs=True, **fields), await world.open(request_id="r2")
            await world.attach()
            await world.attach(request_id="r2", first_sequence=200)
            row = (100, length, HELLO[0])
            prompt = [(100, position, 9) for position in range(1, length)]
            world.publish(step_output(0, reported(*prompt, row), row))
            error = await reader.error()
            assert (error.code, error.error, error.retryable) == (413, "payload_too_large", False)
            assert reader.over
            world.step((200, 0, HELLO[0], Finish.LENGTH), step=1)
            await other.end()
            await until(lambda: world.aborted)
            assert world.aborted == [([100], AbortReason.CANCELLED)]
            assert await world.cancel(reader.accepted.cancel) == "ended"

    async def test_a_stream_whose_first_frame_is_too_large_ends_once(self, folder: Path) -> None:
        fields: dict[str, Any] = {"prompt_lengths": pack([400]), "prompts": (pack([END] * 400),)}
        async with rig(folder, broker=MemoryBroker(max_payload=2400)) as world:
            reader = await world.open(stored=False, return_token_ids=True, **fields)
            await world.attach((HELLO,), finishes=bytes([Finish.LENGTH]))
            assert (await reader.error()).code == 413
            await until(lambda: world.load["streams"] == 0)
            other = await world.open(request_id="r2")
            await until(lambda: other.messages)

    async def test_a_stop_string_cuts_log_probabilities_at_its_last_token(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(stream=False, logprobs=True, stop=("world", "lo wor"))
            await world.attach()
            for position, token in enumerate(HELLO):
                row = (100, PROMPT + position, token)
                world.publish(step_output(position, reported(row), row))
            (choice,) = (await reader.result()).choices
            assert choice.stop_reason in {"world", "lo wor"}
            assert len(choice.token_ids) < len(HELLO)
            assert [next(iter(candidates)) for candidates in choice.logprobs or ()] == choice.token_ids

    async def test_tokens_that_only_the_scheduler_knows_are_generated_again(self, folder: Path) -> None:
        async with rig(folder) as world:
            await world.open(logprobs=True)
            answer = await world.attach((HELLO,), finishes=bytes([Finish.STOP]))
            assert answer.state == AttachState.OPEN
            assert unpack(answer.tokens[0]) == []

    @pytest.mark.parametrize("asked", [{"logprobs": True}, {"prompt_logprobs": True, "prompts": (pack([9] * PROMPT),)}])
    async def test_a_token_without_requested_log_probabilities_counts_as_lost(
        self, folder: Path, asked: dict[str, Any]
    ) -> None:
        async with rig(folder) as world:
            await world.open(**asked)
            await world.attach()
            world.generate(HELLO[:1])
            await until(lambda: world.aborted)
            assert world.aborted == [([100], AbortReason.LOST_TOKENS)]


def step_output(
    step: int, columns: dict[str, bytes], row: tuple[int, int, int] | None = None, finish: Finish = Finish.NONE
) -> StepOutput:
    """A step with at most one row: sequence, position and token."""
    rows = [] if row is None else [row]
    return StepOutput(
        term=1,
        step=step,
        plan=1,
        sequences=pack(sequence for sequence, _, _ in rows),
        starts=pack(position - 1 for _, position, _ in rows),
        counts=pack(1 for _ in rows),
        tokens=pack(token for _, _, token in rows),
        finishes=bytes(finish for _ in rows),
        elapsed_us=1,
        **columns,
    )


class TestOrigins:
    """Frames say how their tokens came, if the request asks for that."""

    async def test_right_drafts_come_before_a_sampled_token_and_forced_ones_behind(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(return_token_origins=True)
            await world.attach()
            world.publish(step_of(HELLO[:1]))
            world.publish(step_of(HELLO[1:5], step=1, accepted=2, start=1))
            await until(lambda: len(reader.deltas) == 5)
            assert [delta.origin for delta in reader.deltas] == ["sampled", "drafted", "drafted", "sampled", "forced"]

    async def test_frames_have_origins_on_request_alone(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.publish(step_of(HELLO[:3], accepted=2))
            await until(lambda: len(reader.deltas) == 3)
            assert all(b"origin" not in body for body in reader.bodies)

    async def test_tokens_that_came_without_their_steps_have_no_origin(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(return_token_origins=True)
            await world.attach((HELLO[:2],))
            await until(lambda: len(reader.deltas) == 2)
            assert all(b"origin" not in body for body in reader.bodies)
