"""Adapters are loaded, replaced and removed at run time, and no request notices but those that name them later."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.shared import subjects
from pagewire.shared.bus.jetstream import API
from pagewire.shared.bus.streams import ADAPTER_STREAM
from pagewire.shared.errors import InvalidRequest, ModelNotFound, NotPermitted, RequestError, Unavailable
from pagewire.shared.messages.client import Result
from tests.pipeline.test_adapters import BASE, PREFIX, settings
from tests.support.adapters import write_adapter
from tests.support.broker import connect_role
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import Pipeline, running
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


async def text(pipeline: Pipeline, model: str, params: SamplingParams = LONG) -> Result:
    return await pipeline.client.generate(PREFIX, params, model=model)


def operator(pipeline: Pipeline) -> AsyncClient:
    broker = pipeline.brokers[0]
    return AsyncClient(broker.url, user=(broker.user, broker.password))


async def test_an_adapter_lives_from_its_loading_to_its_removal(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "dirs" / "a", checkpoint(BASE), seed=1)
    second = write_adapter(tmp_path / "dirs" / "b", checkpoint(BASE), seed=2)
    outside = write_adapter(tmp_path / "outside", checkpoint(BASE), seed=3)
    (tmp_path / "dirs" / "link").symlink_to(outside)
    folder = tmp_path / "dirs" / "half"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((first / "adapter_config.json").read_bytes())
    (folder / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    async with running(settings({}, lora_dirs=str(tmp_path / "dirs"))) as pipeline, operator(pipeline) as admin:
        with pytest.raises(ModelNotFound):
            await text(pipeline, "x")
        digest = await admin.load_adapter("x", str(first))
        before = await text(pipeline, "x")
        assert before.usage.cached_tokens == 0
        assert {info.name: info.root for info in await pipeline.client.models()}["x"] == digest

        bad = {
            str(outside): "leads out of the folders",
            str(tmp_path / "dirs" / "link"): "leads out of the folders",
            str(folder): "leads out of the folders",
            str(tmp_path / "dirs" / ".." / "outside"): "leads out of the folders",
            str(tmp_path / "dirs" / "missing"): "no such folder",
            "\0": "no path of a file",
        }
        for path, message in bad.items():
            with pytest.raises(InvalidRequest, match=message) as refused:
                await admin.load_adapter("y", path)
            assert str(tmp_path) not in str(refused.value)
        assert await admin.load_adapter("x", str(first)) == digest
        with pytest.raises(InvalidRequest, match="already: set load_inplace"):
            await admin.load_adapter("x", str(second))
        for name, message in {BASE: "have one subject", "a b": "no name", "": "no name"}.items():
            with pytest.raises(InvalidRequest, match=message):
                await admin.load_adapter(name, str(first))
        assert (await text(pipeline, "x")).choices[0].token_ids == before.choices[0].token_ids

        # A request that runs ends with the old content, and a later one has the new content, without old KV.
        stream = pipeline.client.stream(PREFIX, LONG, model="x")
        deltas = aiter(stream)
        tokens = (await anext(deltas)).token_ids
        assert await admin.load_adapter("x", str(second), replace=True) != digest
        after = await text(pipeline, "x")
        tokens += [token async for delta in deltas for token in delta.token_ids]
        assert tokens == before.choices[0].token_ids
        assert after.usage.cached_tokens == 0
        assert after.choices[0].token_ids != before.choices[0].token_ids
        assert after.choices[0].token_ids != (await text(pipeline, BASE)).choices[0].token_ids

        await admin.unload_adapter("x")
        with pytest.raises(ModelNotFound):
            await text(pipeline, "x")
        with pytest.raises(ModelNotFound):
            await admin.unload_adapter("x")
        assert await admin.load_adapter("x", str(first)) == digest
        assert (await text(pipeline, "x")).choices[0].token_ids == before.choices[0].token_ids


async def test_a_request_whose_adapter_is_missing_ends_alone(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", checkpoint(BASE))
    async with running(settings({}, lora_dirs=str(tmp_path))) as pipeline, operator(pipeline) as admin:
        expected = (await text(pipeline, BASE)).choices[0].token_ids
        digest = await admin.load_adapter("sql", str(path))
        bus = await connect_role(pipeline.brokers[0], "executor")
        request = msgspec.json.encode({"filter": f"{subjects.ADAPTER_CONTENT}.{digest}.*"})
        await bus.request(f"{API}.STREAM.PURGE.{ADAPTER_STREAM}", request, timeout=PATIENCE)
        await bus.close()
        stream = aiter(pipeline.client.stream(PREFIX, LONG, model=BASE))
        tokens = (await anext(stream)).token_ids
        with pytest.raises(Unavailable, match="adapter sql cannot be loaded"):
            await text(pipeline, "sql")
        tokens += [token async for delta in stream for token in delta.token_ids]
        assert tokens == expected
        assert await admin.load_adapter("sql", str(path)) == digest
        assert (await text(pipeline, "sql")).choices[0].token_ids != expected


async def test_clients_may_change_no_adapter(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", checkpoint(BASE))
    async with running(settings({}, lora_dirs=str(tmp_path))) as pipeline:
        with pytest.raises((NotPermitted, Unavailable)):
            await pipeline.client.load_adapter("x", str(path))
        assert [info.name for info in await pipeline.client.models()] == [BASE]


async def test_names_change_under_load_and_every_text_is_that_of_its_content(tmp_path: Path) -> None:
    contents = {str(seed): write_adapter(tmp_path / str(seed), checkpoint(BASE), seed=seed) for seed in range(4)}
    short = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    async with running(settings({}, lora_dirs=str(tmp_path), max_loras=2)) as pipeline, operator(pipeline) as admin:
        expected = {}
        for name, path in contents.items():
            await admin.load_adapter(f"fixed-{name}", str(path))
            expected[name] = tuple((await text(pipeline, f"fixed-{name}", short)).choices[0].token_ids)
        assert len(set(expected.values())) == len(contents)
        await admin.load_adapter("moving", str(contents["0"]))
        ended = asyncio.Event()
        seen: set[tuple[int, ...]] = set()

        async def ask() -> None:
            while not ended.is_set():
                try:
                    seen.add(tuple((await text(pipeline, "moving", short)).choices[0].token_ids))
                except (ModelNotFound, Unavailable):  # the name has none, or it has one again already
                    continue

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask())
            for turn in range(12):
                name = str(turn % 4)
                await admin.load_adapter("moving", str(contents[name]), replace=True)
                answer = (await text(pipeline, "moving", short)).choices[0].token_ids
                assert tuple(answer) == expected[name]
                if turn % 5 == 4:
                    await admin.unload_adapter("moving")
                    with pytest.raises(RequestError):
                        await text(pipeline, "moving", short)
            ended.set()
        assert seen <= set(expected.values())
