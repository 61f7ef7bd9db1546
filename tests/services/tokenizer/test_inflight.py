import asyncio

from pagewire.services.tokenizer.inflight import InFlight


class Failure(Exception):
    pass


async def fail() -> None:
    raise Failure


def test_the_number_is_bounded() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        in_flight = InFlight(max_requests=2)
        for _ in range(2):
            assert in_flight.has_room(0)
            in_flight.start(_wait(gate), 0, _never)
        assert not in_flight.has_room(0)
        assert len(in_flight) == 2
        gate.set()
        await in_flight.drain(5)
        assert in_flight.has_room(0)
        assert len(in_flight) == 0

    asyncio.run(main())


def test_the_bytes_are_bounded() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        in_flight = InFlight(max_bytes=100)
        in_flight.start(_wait(gate), 60, _never)
        assert in_flight.has_room(40)
        assert not in_flight.has_room(41)
        gate.set()
        await in_flight.drain(5)
        assert in_flight.has_room(100)

    asyncio.run(main())


def test_an_error_is_reported_and_frees_its_place() -> None:
    async def main() -> None:
        errors: list[BaseException] = []
        in_flight = InFlight(max_requests=1)
        in_flight.start(fail(), 0, errors.append)
        await in_flight.drain(5)
        assert [type(error) for error in errors] == [Failure]
        assert in_flight.has_room(0)

    asyncio.run(main())


def test_draining_lets_the_quick_end_and_cancels_the_late() -> None:
    async def main() -> None:
        ended: list[str] = []
        gate = asyncio.Event()

        async def quick() -> None:
            await asyncio.sleep(0)
            ended.append("quick")

        async def late() -> None:
            try:
                await gate.wait()
            finally:
                ended.append("late")

        in_flight = InFlight()
        in_flight.start(late(), 0, _never)
        in_flight.start(quick(), 0, _never)
        await in_flight.drain(0.05)
        assert ended == ["quick", "late"]
        assert len(in_flight) == 0

    asyncio.run(main())


def test_draining_nothing_returns() -> None:
    asyncio.run(InFlight().drain(0))


async def _wait(gate: asyncio.Event) -> None:
    await gate.wait()


def _never(error: BaseException) -> None:
    raise AssertionError(error)
