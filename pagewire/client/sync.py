"""The synchronous client, for programs without an event loop."""

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Self, TypeVar

from pagewire.client.async_client import CLOSED, AsyncClient, Messages, Prompt
from pagewire.client.stream import Stream
from pagewire.shared.bus.nats import CLOSE_TIMEOUT
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages.client import Delta, ModelInfo, Result, SamplingParams

T = TypeVar("T")


class LoopThread:
    """An event loop in a background thread, on which other threads run coroutines."""

    def __init__(self) -> None:
        self._closing, self._lock = False, threading.RLock()  # nothing is begun once the loop ends
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewire", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result. An interrupt of the calling thread cancels the coroutine.

        Raises:
            BusUnavailable: the loop is closed, before or meanwhile.
        """
        with self._lock:
            if self._closing:
                work.close()
                raise BusUnavailable(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise BusUnavailable(CLOSED) from error
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the loop and its thread, and what other threads still run there. May be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Client:
    """A connection to a running stack: `with Client() as client: ...`. The arguments are those of `AsyncClient`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        model: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._client = AsyncClient(url, api_key=api_key, tenant=tenant, model=model, tls=tls)
        self._thread = LoopThread()

    def __enter__(self) -> Self:
        try:
            self._thread.run(self._client.__aenter__())
        except BaseException:  # a `with` that cannot be entered does not call `__exit__`
            self._thread.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._thread.run(self._client.__aexit__())
        finally:
            self._thread.close()

    def stream(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Sends a request and yields its deltas. The arguments are those of `AsyncClient.stream`."""
        yield from self._deltas(self._client.stream(prompt, sampling, **options))

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Sends a conversation and yields the deltas of the model's answer."""
        yield from self._deltas(self._client.stream_chat(messages, sampling, **options))

    def generate(self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Any) -> Result:
        """Sends a request and returns its result. The arguments are those of `AsyncClient.stream`."""
        return self._thread.run(self._client.generate(prompt, sampling, **options))

    def chat(self, messages: Messages, sampling: SamplingParams | None = None, **options: Any) -> Result:
        """Returns the model's whole answer to a conversation."""
        return self._thread.run(self._client.chat(messages, sampling, **options))

    def cancel(self, request_id: str) -> str:
        """Cancels a request of any client of the tenant. Returns cancelled, ended or unknown."""
        return self._thread.run(self._client.cancel(request_id))

    def models(self) -> list[ModelInfo]:
        """Returns the models that are served."""
        return self._thread.run(self._client.models())

    def load_adapter(self, name: str, path: str, model: str = "", *, replace: bool = False) -> str:
        """Loads an adapter (LoRA). The arguments are those of `AsyncClient.load_adapter`."""
        return self._thread.run(self._client.load_adapter(name, path, model, replace=replace))

    def unload_adapter(self, name: str, model: str = "") -> str:
        """Removes an adapter; returns the hash of its content."""
        return self._thread.run(self._client.unload_adapter(name, model))

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """Returns the token ids of a text."""
        return self._thread.run(self._client.tokenize(text, model))

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """Returns the text of token ids."""
        return self._thread.run(self._client.detokenize(token_ids, model))

    def _deltas(self, stream: Stream) -> Iterator[Delta]:
        deltas = stream.__aiter__()
        try:
            while (delta := self._thread.run(_next(deltas))) is not None:
                yield delta
        finally:
            with suppress(BusUnavailable):  # the client was closed first, and has ended the stream
                self._thread.run(deltas.aclose())


async def _end_tasks() -> None:
    """Cancels all other tasks of the loop, waits for them and ends its generators."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_TIMEOUT)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _next(deltas: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(deltas, None)
