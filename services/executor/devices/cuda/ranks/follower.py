"""A rank other than 0: a process with a GPU of its own, which repeats the calls of rank 0's device until that ends.

Each rank has a whole `CudaDevice`: tables, graphs and sampler. Logits are the same bits on all ranks, and so are the
tokens that they sample: no token is exchanged.
"""

import gc
import os
import socket
from collections import deque
from pathlib import Path
from typing import BinaryIO

import structlog
import torch

from pagewire.services.executor.devices.cuda.device import DEPTH, CudaDevice
from pagewire.services.executor.devices.cuda.output_ring import PendingCopy
from pagewire.services.executor.devices.cuda.part import CudaPart
from pagewire.services.executor.devices.cuda.ranks.collectives import TorchCollectives
from pagewire.services.executor.devices.cuda.ranks.device_calls import FollowingMasks, next_call, with_grammar
from pagewire.services.executor.devices.cuda.ranks.shared_page import SharedPage
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime
from pagewire.services.executor.devices.ranks.adapters import FollowingAdapters
from pagewire.services.executor.devices.ranks.follower import say_ready
from pagewire.services.executor.devices.ranks.shard_settings import shard_of
from pagewire.services.executor.devices.ranks.startup import Connect, Connection, Loaded, Sizes, Start, fingerprint_of
from pagewire.shared.errors import ConfigurationError, DeviceLost
from pagewire.shared.models.model_folder import read_config

_log = structlog.get_logger()


def follow(connection: Connection, start: Start) -> None:
    """Loads a rank's part of the model, computes until rank 0 ends the ranks or one is lost, and ends the process."""
    try:
        _compute(connection, start)
    except EOFError:
        _log.info("rank_ended")
    except DeviceLost as error:
        _log.warning("rank_lost", reason=str(error))
    except Exception:  # noqa: BLE001  # whatever it is, the process ends
        _log.exception("rank_failed")
    os._exit(0)  # at once, so that rank 0 notices: NCCL would wait for the other ranks


def _compute(connection: Connection, start: Start) -> None:
    settings, folder, rank = start.settings, Path(start.folder), start.rank
    size = settings.tensor_parallel_size
    torch.set_num_threads(start.threads)
    runtime = CudaRuntime(rank)
    collectives = TorchCollectives(rank, size, start.store, runtime.device)
    try:
        part = CudaPart.load(settings, folder, read_config(folder), runtime, shard_of(settings, rank), collectives)
    except ConfigurationError as error:
        connection.send(Loaded(refusal=str(error)))
        return
    torch.set_num_threads(1)  # only small operations are left on the host
    connection.send(Loaded(fingerprint_of(settings, folder)))

    connection.receive(Connect)
    collectives.connect()
    connection.send(part.measure())
    capacity = connection.receive(Sizes).capacity
    page, calls = SharedPage(start.memory, rank, size), connection.end.makefile("rb")
    device = part.open(capacity, FollowingMasks(capacity, calls), page.note)
    adapters = None
    if part.adapters is not None:
        adapters = FollowingAdapters(part.adapters, Connection(socket.socket(fileno=start.adapters)))
    gc.collect()
    gc.freeze()
    say_ready(connection, page.heartbeats, rank)
    repeat(device, calls, adapters)


def repeat(device: CudaDevice, calls: BinaryIO, adapters: FollowingAdapters | None) -> None:
    """Repeats the calls of rank 0.

    Raises:
        EOFError: it has ended the ranks.
        DeviceLost: a rank is gone.
    """
    pending: deque[PendingCopy] = deque()
    while True:
        name, arguments = next_call(calls)
        match name:
            case "add":
                slot, blocks, sampling, stop_ids, edits, structured = arguments
                device.add(slot, blocks, sampling, stop_ids, with_grammar(edits, structured=structured))
            case "extend":
                device.extend(*arguments)
            case "copy":
                device.copy(*arguments)
            case "forget":
                assert adapters is not None
                adapters.forget(*arguments)
            case "launch":
                batch, numbers = arguments
                if adapters is not None:
                    adapters.prepare(batch.slots, numbers)
                if len(pending) == DEPTH:
                    pending.popleft().wait()
                pending.append(device.launch(batch))
