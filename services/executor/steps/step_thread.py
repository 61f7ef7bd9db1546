"""The only thread that uses the device: it opens the device, runs steps, and closes the device."""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from pagewire.services.executor.adapter_loader import AdapterLoader, FetchAdapter
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Capacity, Device
from pagewire.services.executor.outputs.result_queue import ResultQueue
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.speculation.open_speculator import open_speculator
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.services.executor.steps.plan_inbox import PlanInbox
from pagewire.services.executor.steps.step_loop import StepLoop
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.models.model_folder import eos_ids, folder_of, tokenizer_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings.config import Settings


class DeviceThread:
    """A step loop on its own thread, because all calls of a device must come from one thread.

    Attributes:
        capacity: capacity of the device.
        steps: the step loop.
        adapter_targets: the modules that adapters may change; None: the device has no adapters.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        device: Device,
        inbox: PlanInbox,
        steps: StepLoop,
        grammars: GrammarOpener,
        adapters: AdapterLoader | None,
    ) -> None:
        self.capacity: Capacity = device.capacity
        self.adapter_targets = None if device.adapters is None else device.adapters.targets
        self.steps = steps
        self._grammars = grammars
        self._adapters = adapters
        self._inbox = inbox
        self._thread = thread
        self._stepping = asyncio.get_running_loop().run_in_executor(thread, _run, steps, device)

    @classmethod
    async def open(
        cls,
        settings: Settings,
        inbox: PlanInbox,
        deliver: Callable[[StepResult | PlanRefused], None],
        fetch: FetchAdapter | None = None,
    ) -> "DeviceThread":
        """Opens the device, which may take minutes, and starts the step loop. `deliver` is called on the event loop.

        `fetch` returns the files of adapters, on a thread of its own; None: there are none.

        Raises:
            ConfigurationError: the model or the device cannot be opened as configured.
        """
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "device")
        try:
            device, grammars, speculator, adapters = await loop.run_in_executor(thread, _open, settings, fetch)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        steps = StepLoop(device, inbox, ResultQueue(loop, deliver).put, grammars, speculator, adapters)
        return cls(thread, device, inbox, steps, grammars, adapters)

    async def failure(self) -> None:
        """Waits until a step fails and raises its exception. The device's state is unknown then."""
        await asyncio.shield(self._stepping)

    async def close(self) -> None:
        """Ends the loop after the steps in flight and closes the device."""
        self._inbox.close()
        await asyncio.wait({self._stepping})
        self._thread.shutdown(wait=False)
        self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()


def _open(
    settings: Settings, fetch: FetchAdapter | None
) -> tuple[Device, GrammarOpener, Speculator | None, AdapterLoader | None]:
    folder = folder_of(settings)
    device = open_device(settings, folder)
    speculator = open_speculator(settings, device)
    eos = eos_ids(folder)
    compiler = GrammarCompiler(
        lambda: load_tokenizer(tokenizer_folder(settings)).backend, device.capacity.vocab_size, eos
    )
    adapters = None
    if device.adapters is not None and fetch is not None:
        kept = settings.max_cpu_loras or settings.max_loras
        adapters = AdapterLoader(device.adapters, fetch, settings.max_lora_rank, kept)
    gc.collect()
    gc.freeze()  # the objects of the weights and libraries live until the end
    return device, GrammarOpener(compiler), speculator, adapters


def _run(steps: StepLoop, device: Device) -> None:
    try:
        with closing(device):
            steps.run()
    finally:
        gc.unfreeze()
