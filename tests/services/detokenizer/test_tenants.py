"""Only clients of its own tenant cancel and resume a stream, if they know its secret, or its id for a cancel."""

from pathlib import Path

import msgspec
import pytest

from pagewire.shared import subjects
from pagewire.shared.messages.client import CancelReply, Final
from tests.services.detokenizer.rig import HELLO, KEY, Reader, Rig, rig
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

OWNED = subjects.owned("alice", "r1")


async def reader_of(world: Rig, tenant: str) -> Reader:
    """A reader with an inbox of a tenant."""
    reader = await world.reader()
    reader.inbox = f"{subjects.client_inbox(tenant)}.{reader.inbox.rpartition('.')[2]}"
    await world.client.subscribe(reader.inbox, reader.receive)
    return reader


async def open_for_alice(world: Rig) -> Reader:
    reader = await reader_of(world, "alice")
    await world.open_for(reader, request_id=OWNED)
    await until(lambda: reader.frames)
    return reader


async def cancel(world: Rig, subject: str, tenant: str) -> str:
    """The answer to a cancel by a tenant at `subject`, whose reply subject is in an inbox of that tenant."""
    reader = await reader_of(world, tenant)
    world.client.publish(subject, b"", reply=reader.inbox)
    await until(lambda: reader.messages)
    return msgspec.json.decode(reader.bodies[0], type=CancelReply).state


async def test_frames_name_the_id_that_the_client_knows(folder: Path) -> None:
    async with rig(folder) as world:
        reader = await open_for_alice(world)
        assert reader.accepted.request_id == "r1"
        assert reader.accepted.cancel == f"pagewire.v1.tenant.alice.cancel.d1.r1.{KEY}"
        assert reader.accepted.resume == f"pagewire.v1.tenant.alice.resume.d1.r1.{KEY}"
        await world.attach(request_id=OWNED)
        world.generate(HELLO)
        assert await cancel(world, reader.accepted.cancel, "alice") == "cancelled"
        end = await reader.end()
        assert isinstance(end, Final)
        assert end.request_id == "r1"


async def test_the_same_id_of_two_tenants_is_two_streams(folder: Path) -> None:
    async with rig(folder) as world:
        await open_for_alice(world)
        await world.open(digest=b"another")
        assert world.load["streams"] == 2


@pytest.mark.parametrize("tenant", ["", "bob"])
async def test_no_other_tenant_can_cancel(folder: Path, tenant: str) -> None:
    async with rig(folder) as world:
        await open_for_alice(world)
        for subject in (f"{subjects.CANCEL}.d1.r1.{KEY}", f"{subjects.CANCEL}.r1"):
            assert await cancel(world, subjects.for_tenant(subject, tenant), tenant) == "unknown"
        assert world.load["streams"] == 1


@pytest.mark.parametrize("tenant", ["", "bob"])
async def test_no_other_tenant_can_resume(folder: Path, tenant: str) -> None:
    async with rig(folder) as world:
        await open_for_alice(world)
        reader = await reader_of(world, tenant)
        subject = subjects.for_tenant(f"{subjects.RESUME}.d1.r1.{KEY}", tenant)
        world.client.publish(subject, b'{"start": 0}', reply=reader.inbox)
        assert (await reader.error()).code == 400


async def test_a_tenant_cannot_resume_into_the_inbox_of_another(folder: Path) -> None:
    async with rig(folder) as world:
        first = await open_for_alice(world)
        reader = await reader_of(world, "bob")
        world.client.publish(first.accepted.resume, b'{"start": 0}', reply=reader.inbox)
        await until(lambda: world.load["dropped_replies"] == 1)
        assert not reader.messages


@pytest.mark.parametrize("secret", ["0" * 32, KEY[:-1], KEY + "0", KEY.upper(), "x"])
async def test_a_cancel_and_a_resumption_need_the_streams_secret(folder: Path, secret: str) -> None:
    async with rig(folder) as world:
        await world.open()
        subject = f"d1.r1.{secret}"
        assert await world.cancel(f"{subjects.CANCEL}.{subject}") == "unknown"
        reader = await world.resume(f"{subjects.RESUME}.{subject}", 0)
        assert (await reader.error()).code == 400
        assert world.load["streams"] == 1


async def test_a_client_cancels_by_its_id_alone_within_its_tenant(folder: Path) -> None:
    async with rig(folder) as world:
        await world.open()
        await open_for_alice(world)
        assert await cancel(world, subjects.for_tenant(f"{subjects.CANCEL}.r1", "alice"), "alice") == "cancelled"
        assert await cancel(world, f"{subjects.CANCEL}.r1", "") == "cancelled"


async def test_a_restarted_detokenizer_takes_the_same_secret(folder: Path) -> None:
    async with rig(folder) as world:
        await world.open()
        await world.attach()
        assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "cancelled"
        await until(lambda: world.load["streams"] == 0)
        broker = world.broker
    async with rig(folder, broker=broker) as world:
        assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{'0' * 32}") == "unknown"
        assert await world.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "ended"
