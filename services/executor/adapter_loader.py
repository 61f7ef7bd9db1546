"""Loads adapters by their hashes, on a thread of its own, and keeps those that were used last."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from typing_extensions import override

from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.devices.protocol import AdapterSlots, LoadedAdapter
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.errors import ConfigurationError, DeviceLost

_log = structlog.get_logger()


FetchAdapter = Callable[[str], AdapterFiles]
"""Returns the files of an adapter with a hash, in bounded time, or raises ConfigurationError. Called on a thread."""


class SequenceAdapter(LoadedAdapter):
    """An adapter that is loaded, or that will be.

    Attributes:
        ready: whether loading has ended, successfully or not.
    """

    def __init__(self) -> None:
        self.ready = False
        self._packed: Any = None
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def lost(self) -> bool:
        """Whether loading has failed. The log says why."""
        return self.ready and self._packed is None

    @property
    @override
    def packed(self) -> Any:
        assert self._packed is not None, "no sequence runs without its adapter"
        return self._packed

    def notify(self, loaded: Callable[[], None]) -> None:
        """Has `loaded` called when it is ready, unless it is."""
        with self._lock:
            if not self.ready:
                self._waiting.append(loaded)

    def forget(self) -> None:
        """Takes back one `notify`, whose sequence has gone."""
        with self._lock:
            if self._waiting:
                self._waiting.pop()

    def is_dropped(self) -> bool:
        """Returns whether no sequence waits for it any more, before it is loaded; then it counts as lost."""
        with self._lock:
            self.ready |= not self._waiting
            return self.ready

    def put(self, packed: Any) -> None:
        """Ends the loading with the packed adapter; None: loading failed."""
        with self._lock:
            self._packed, self.ready = packed, True
            waiting, self._waiting = self._waiting, []
        for loaded in waiting:
            loaded()


class AdapterLoader:
    """Loads the adapters of sequences, one after the other. `load` is called on one thread."""

    def __init__(self, slots: AdapterSlots, fetch: FetchAdapter, max_rank: int, kept: int) -> None:
        """`kept` adapters stay in memory."""
        self.slots = slots
        self._fetch = fetch
        self._max_rank = max_rank
        self._kept = kept
        self._adapters: OrderedDict[str, SequenceAdapter] = OrderedDict()  # the last used one last
        self._in_use: weakref.WeakValueDictionary[str, SequenceAdapter] = weakref.WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, "adapters")

    def load(self, digest: str, loaded: Callable[[], None]) -> SequenceAdapter:
        """Returns the adapter of a hash. If it is not ready, `loaded` is called on another thread when it is."""
        adapter = self._in_use.get(digest)
        if adapter is not None:
            adapter.notify(loaded)
        if adapter is None or adapter.lost:
            adapter = self._in_use[digest] = SequenceAdapter()
            adapter.notify(loaded)
            self._thread.submit(self._read, digest, adapter)
        self._adapters[digest] = adapter
        self._adapters.move_to_end(digest)
        while len(self._adapters) > self._kept:
            self._adapters.popitem(last=False)  # it stays in use as long as a sequence has it
        return adapter

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, digest: str, adapter: SequenceAdapter) -> None:
        if adapter.is_dropped():
            return
        packed = None
        try:
            packed = self.slots.pack(read_adapter(self._fetch(digest), self.slots.targets, self._max_rank))
            _log.info("adapter_loaded", adapter=digest)
        except DeviceLost:
            return  # the executor ends: its sequences wait for another one, and none of them fails
        except ConfigurationError as error:
            _log.error("adapter_not_loaded", adapter=digest, reason=str(error))
        except Exception:  # noqa: BLE001 - whatever it is, sequences do not wait for ever
            _log.exception("adapter_not_loaded", adapter=digest)
        adapter.put(packed)
