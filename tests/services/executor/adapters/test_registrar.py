"""Names and content of adapters, as executors change them in the store of a real broker."""

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pagewire.services.executor.adapters import registrar as registrar_module
from pagewire.services.executor.adapters.registrar import Registrar
from pagewire.shared import subjects
from pagewire.shared.adapters import adapter_store
from pagewire.shared.adapters import files as adapter_files
from pagewire.shared.adapters.adapter_store import AdapterStore
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.bus import Bus
from pagewire.shared.bus.jetstream import API
from pagewire.shared.bus.streams import ADAPTER_STREAM
from pagewire.shared.errors import ConfigurationError, InvalidRequest, StorageRefused
from pagewire.shared.messages.adapters import AdapterRecord, AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.settings.config import Settings
from tests.services.executor.adapters.test_bad_adapters import MAX_RANK, modules
from tests.support.adapter_store import store_of_executor
from tests.support.adapters import write_adapter, write_gguf_adapter
from tests.support.checkpoints import checkpoint
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

BASE = "llama"


def registrar(store: AdapterStore, folder: Path, **changes: Any) -> Registrar:
    """The registrar of an executor that may load adapters from a folder."""
    values: dict[str, Any] = {"model": str(checkpoint(BASE)), "served_model_name": BASE, "enable_lora": True}
    settings = Settings(**values | {"lora_dirs": str(folder), "max_lora_rank": MAX_RANK} | changes)
    return Registrar(store, settings, modules(BASE))


def adapter(folder: Path, seed: int = 0) -> Path:
    return write_adapter(folder / str(seed), checkpoint(BASE), seed=seed)


async def test_no_content_is_hashed_or_encoded_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {}

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(adapter_files, "sha256", recorded("hash", hashlib.sha256))
    for name in ("encode", "decode"):
        monkeypatch.setattr(msgspec.msgpack, name, recorded(name, getattr(msgspec.msgpack, name)))
    path = adapter(tmp_path)
    async with store_of_executor() as (store, _):
        for _ in range(2):
            reply = await registrar(store, tmp_path).load(LoadAdapterRequest("a", str(path)))
        assert (await store.get(reply.digest)).digest == reply.digest
    assert threads.keys() == {"hash", "encode", "decode"}
    assert threading.get_ident() not in set.union(*threads.values())


async def test_a_link_to_a_file_is_read_in_the_format_of_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's cache has links to files that are named by their hashes. A slow disk holds up nothing else."""
    (tmp_path / "blobs").mkdir()
    blob = write_gguf_adapter(tmp_path / "blobs" / "0123abcd", checkpoint(BASE))
    link = tmp_path / "adapter.gguf"
    link.symlink_to(blob)
    resolving = set[int]()
    resolve = Path.resolve

    def recorded(path: Path, *, strict: bool = False) -> Path:
        resolving.add(threading.get_ident())
        return resolve(path, strict)

    monkeypatch.setattr(Path, "resolve", recorded)
    async with store_of_executor() as (store, _):
        reply = await registrar(store, tmp_path).load(LoadAdapterRequest("a", str(link)))
        assert not (await store.get(reply.digest)).config
        with pytest.raises(InvalidRequest, match="leads out of the folders"):
            await registrar(store, tmp_path / "other").load(LoadAdapterRequest("b", str(link)))
    assert threading.get_ident() not in resolving


async def lose_part(bus: Bus, digest: str) -> None:
    request = msgspec.json.encode({"filter": f"{subjects.ADAPTER_CONTENT}.{digest}.0"})
    await bus.request(f"{API}.STREAM.PURGE.{ADAPTER_STREAM}", request, timeout=PATIENCE)


async def damage_part(bus: Bus, digest: str) -> None:
    await bus.request(f"{subjects.ADAPTER_CONTENT}.{digest}.0", b"something else", timeout=PATIENCE)


@pytest.mark.parametrize("spoil", [lose_part, damage_part])
async def test_loading_again_restores_content(tmp_path: Path, spoil: Callable[[Bus, str], Awaitable[None]]) -> None:
    path = adapter(tmp_path)
    async with store_of_executor() as (store, bus):
        reply = await registrar(store, tmp_path).load(LoadAdapterRequest("a", str(path)))
        await spoil(bus, reply.digest)
        with pytest.raises(ConfigurationError, match="load it again"):
            await store.get(reply.digest)
        assert await registrar(store, tmp_path).load(LoadAdapterRequest("a", str(path))) == reply
        assert (await store.get(reply.digest)).digest == reply.digest


async def test_a_start_restores_the_content_of_configured_adapters(tmp_path: Path) -> None:
    path = adapter(tmp_path)
    async with store_of_executor() as (store, bus):
        configured = registrar(store, tmp_path, lora_modules=f"a={path}")
        await configured.configure()
        record, _ = await store.record("a")
        assert record is not None
        await lose_part(bus, record.digest)
        await configured.configure()
        assert (await store.get(record.digest)).digest == record.digest


async def test_content_that_is_deleted_while_its_name_is_set_is_stored_again(tmp_path: Path) -> None:
    path = adapter(tmp_path)
    async with store_of_executor() as (store, bus):

        class Swept(AdapterStore):
            """Another executor deletes the content, which it has not seen a name of."""

            @override
            async def set_name(self, record: AdapterRecord, revision: int) -> bool:
                request = msgspec.json.encode({"filter": f"{subjects.ADAPTER_CONTENT}.{record.digest}.*"})
                await bus.request(f"{API}.STREAM.PURGE.{ADAPTER_STREAM}", request, timeout=PATIENCE)
                return await super().set_name(record, revision)

        swept = Swept(bus, "m")
        reply = await registrar(swept, tmp_path).load(LoadAdapterRequest("a", str(path)))
        assert (await store.get(reply.digest)).digest == reply.digest
        await registrar(swept, tmp_path, lora_modules=f"b={path}").configure()
        assert (await store.get(reply.digest)).digest == reply.digest


class Together(AdapterStore):
    """Waits, before it stores content for the first time, until another one is about to do so."""

    def __init__(self, bus: Bus, both: asyncio.Barrier) -> None:
        super().__init__(bus, "m")
        self.both: asyncio.Barrier | None = both

    @override
    async def put(self, files: AdapterFiles) -> None:
        both, self.both = self.both, None
        if both is not None:
            await both.wait()
        await super().put(files)


async def load_together(bus: Bus, folder: Path, *names: str, replace: bool = False) -> list[Any]:
    """The answers of two executors that load another adapter each at the same time."""
    both = asyncio.Barrier(2)
    loads = [
        registrar(Together(bus, both), folder).load(
            LoadAdapterRequest(name, str(adapter(folder, seed)), load_inplace=replace)
        )
        for seed, name in enumerate(names)
    ]
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*loads, return_exceptions=True)


@pytest.mark.parametrize(("names", "message"), [(("a", "a"), "another adapter a already"), (("a.b", "a_b"), "subject")])
async def test_one_of_two_loads_of_a_name_is_refused(tmp_path: Path, names: tuple[str, str], message: str) -> None:
    async with store_of_executor() as (store, bus):
        await store.set_name(AdapterRecord(names[0], ""), 0)
        answers = await load_together(bus, tmp_path, *names)
        (refusal,) = (answer for answer in answers if isinstance(answer, Exception))
        assert isinstance(refusal, InvalidRequest)
        assert message in str(refusal)
        (reply,) = (answer for answer in answers if isinstance(answer, AdapterReply))
        record, _ = await store.record("a" if "a" in names else "a.b")
        assert record == AdapterRecord(reply.lora_name, reply.digest)


async def test_of_two_replacements_of_a_name_the_later_one_stays(tmp_path: Path) -> None:
    async with store_of_executor() as (store, bus):
        first, second = await load_together(bus, tmp_path, "a", "a", replace=True)
        record, _ = await store.record("a")
        assert record in [AdapterRecord("a", first.digest), AdapterRecord("a", second.digest)]


async def test_two_executors_configure_the_same_names_at_once(tmp_path: Path) -> None:
    modules = f"a={adapter(tmp_path)}"
    async with store_of_executor() as (store, bus):
        both = asyncio.Barrier(2)
        starts = [registrar(Together(bus, both), tmp_path, lora_modules=modules).configure() for _ in range(2)]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*starts)
        record, revision = await store.record("a")
        assert record is not None
        assert record.configured == record.digest
        assert await store.set_name(AdapterRecord("a", ""), revision)
        assert not await store.set_name(record, revision)


async def test_content_that_the_settings_replace_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of_executor() as (store, _):
        digests = []
        for seed in range(2):
            await registrar(store, tmp_path, lora_modules=f"a={adapter(tmp_path, seed)}").configure()
            record, _ = await store.record("a")
            assert record is not None
            digests.append(record.digest)
        assert [await store.has(digest) for digest in digests] == [True, True]
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        await store.sweep()
        assert [await store.has(digest) for digest in digests] == [False, True]


async def test_a_name_is_removed_though_the_disk_is_full(tmp_path: Path) -> None:
    class Full(AdapterStore):
        """Has no room for a mark."""

        @override
        async def retire(self, digest: str) -> None:
            raise StorageRefused(digest, "maximum bytes exceeded")

    async with store_of_executor() as (store, bus):
        await registrar(store, tmp_path).load(LoadAdapterRequest("a", str(adapter(tmp_path))))
        await registrar(Full(bus, "m"), tmp_path).unload(UnloadAdapterRequest("a"))
        record, _ = await store.record("a")
        assert record is not None
        assert record.digest == ""


async def test_an_executor_deletes_content_though_no_name_changes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar_module, "SWEEP_INTERVAL", 0.01)
    async with store_of_executor() as (store, _):
        names = registrar(store, tmp_path)
        digest = (await names.load(LoadAdapterRequest("a", str(adapter(tmp_path))))).digest
        await names.unload(UnloadAdapterRequest("a"))
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(names.run())
            while await store.has(digest):  # noqa: ASYNC110 - the store is asked each time
                await asyncio.sleep(0)
            running.cancel()
