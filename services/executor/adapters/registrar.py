"""Loads and removes adapters for all services: checks their files, and stores content and names in the broker."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.adapters.targets import Targets
from pagewire.shared.adapters.adapter_store import AdapterStore
from pagewire.shared.adapters.files import CONFIG, WEIGHTS, AdapterFiles, read_files
from pagewire.shared.adapters.lora_modules import check_name, lora_modules
from pagewire.shared.errors import BusError, ConfigurationError, InvalidRequest, ModelNotFound, StorageRefused
from pagewire.shared.messages.adapters import AdapterRecord, AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.models import model_folder
from pagewire.shared.settings.config import Settings, names

SWEEP_INTERVAL = 600.0
"""Seconds between two searches for content without a name."""

_log = structlog.get_logger()


class Registrar:
    """The names of the adapters of one model."""

    def __init__(self, store: AdapterStore, settings: Settings, targets: Targets) -> None:
        self._store = store
        self._settings = settings
        self._targets = targets

    async def configure(self) -> None:
        """Gives the names of `--lora-modules` their content.

        A name that has changed since at run time stays as it is, unless the content behind the setting is another.

        Raises:
            ConfigurationError: an adapter cannot be used.
            BusError: the broker cannot store it.
        """
        await self._sweep()
        for module in lora_modules(self._settings):
            try:
                files = await asyncio.to_thread(self._checked, Path(module.path))
            except ConfigurationError as error:
                raise ConfigurationError(f"adapter {module.name}: {error}") from error
            while not await self._configure(module.name, files):
                continue

    async def run(self) -> None:
        """Deletes content that no name has had for long, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            await self._sweep()

    async def load(self, request: LoadAdapterRequest) -> AdapterReply:
        """Gives a name an adapter.

        Raises:
            InvalidRequest: the name is taken, or the adapter cannot be used.
            BusError: the broker cannot store it.
        """
        name = request.lora_name
        try:
            await self._record(name)  # before the files, which may take long
            files = await asyncio.to_thread(self._allowed, request.lora_path)
            while not await self._load(name, files, replace=request.load_inplace):
                continue
        except ConfigurationError as error:
            raise InvalidRequest(f"adapter {name}: {error}") from error
        return AdapterReply(name, files.digest)

    async def unload(self, request: UnloadAdapterRequest) -> AdapterReply:
        """Removes the adapter of a name. Requests that run with it end with it.

        Raises:
            ModelNotFound: the name has none.
            BusError: the broker cannot store it.
        """
        while True:
            record, revision = await self._store.record(request.lora_name)
            if record is None or not record.digest or record.name != request.lora_name:
                raise ModelNotFound(f"there is no adapter {request.lora_name}: GET /v1/models lists them")
            with suppress(StorageRefused):  # a full disk keeps no name: a sweep marks the content later
                await self._store.retire(record.digest)
            if await self._store.set_name(AdapterRecord(record.name, "", record.configured), revision):
                break
        _log.info("adapter_removed", name=record.name, adapter=record.digest)
        return AdapterReply(record.name, record.digest)

    async def _configure(self, name: str, files: AdapterFiles) -> bool:
        """Gives a name of the settings its content; returns False if the name has changed meanwhile."""
        record, revision = await self._store.record(name)
        if record is None or record.configured != files.digest:
            return await self._name(AdapterRecord(name, files.digest, files.digest), record, revision, files)
        if record.digest == files.digest:
            await self._store.put(files)
        return True

    async def _load(self, name: str, files: AdapterFiles, *, replace: bool) -> bool:
        """Gives a name an adapter that was loaded; returns False if the name has changed meanwhile."""
        record, revision = await self._record(name)
        if record is not None and record.digest == files.digest:  # a request is sent again, or restores the content
            await self._store.put(files)
            return True
        if record is not None and record.digest and not replace:
            raise InvalidRequest(f"there is another adapter {name} already: set load_inplace to replace it")
        configured = record.configured if record is not None and record.name == name else ""
        return await self._name(AdapterRecord(name, files.digest, configured), record, revision, files)

    async def _record(self, name: str) -> tuple[AdapterRecord | None, int]:
        """Returns the record of a name that an adapter may have, and its revision.

        Raises:
            ConfigurationError: an adapter cannot have this name.
        """
        check_name(name, model_folder.served_names(self._settings))
        record, revision = await self._store.record(name)
        if record is not None and record.digest and record.name != name:
            check_name(name, [record.name])
        return record, revision

    async def _name(
        self, record: AdapterRecord, before: AdapterRecord | None, revision: int, files: AdapterFiles
    ) -> bool:
        """Stores the content of an adapter and sets its name, which had the record `before` at `revision`.

        Returns False if the name has changed since.
        """
        await self._sweep()  # which may make room
        await self._store.put(files)
        if before is not None and before.digest:
            await self._store.retire(before.digest)
        if not await self._store.set_name(record, revision):
            return False
        if not await self._store.has(files.digest):  # another executor has deleted it, before it had this name
            await self._store.put(files)
        _log.info("adapter_named", name=record.name, adapter=files.digest)
        return True

    async def _sweep(self) -> None:
        try:
            await self._store.sweep()
        except BusError as error:
            _log.warning("adapters_not_swept", reason=str(error))

    def _allowed(self, text: str) -> AdapterFiles:
        """Returns the files of an adapter that can be used, from a path within `--lora-dirs`. Blocks."""
        return self._checked(allowed_path(text, names(self._settings.lora_dirs)))

    def _checked(self, path: Path) -> AdapterFiles:
        """Returns the files of an adapter that can be used. Blocks, for as long as they take."""
        files = read_files(path)
        read_adapter(files, self._targets, self._settings.max_lora_rank)
        _ = files.digest  # computed here, on a thread: it stays with the files
        return files


def allowed_path(text: str, folders: Sequence[str]) -> Path:
    """Returns the path of an adapter, all of whose files lie within one of `folders`, links followed. Blocks.

    The path is as it was named: the name of a link says the format, that of its target need not.

    Raises:
        ConfigurationError: they do not, or there are no folders.
    """
    if not folders:
        raise ConfigurationError("adapters are loaded at the start only: set lora-dirs to the folders that have others")
    roots = [Path(folder).expanduser().resolve() for folder in folders]
    try:
        path = Path(text).expanduser()
        files = [each.resolve() for each in (path, path / CONFIG, path / WEIGHTS)]
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError("lora_path is no path of a file") from error
    if not any(all(file.is_relative_to(root) for file in files) for root in roots):
        raise ConfigurationError("lora_path leads out of the folders of lora-dirs: move the adapter into one of them")
    return path
