"""uvicorn's main loop, which ticks seldom and ends at once."""

import asyncio
import inspect

import uvicorn

from service.http.event_loop import slow_down_ticks

_FOR_EVER = 3600.0


class Server:
    def __init__(self) -> None:
        self.counters: list[int] = []
        self.should_exit = False
        self.ticked = asyncio.Event()

    async def on_tick(self, counter: int) -> bool:
        self.counters.append(counter)
        self.ticked.set()
        return self.should_exit

    async def main_loop(self) -> None:
        raise AssertionError("its own loop")


def test_a_server_that_is_woken_ends_without_waiting_for_its_next_tick() -> None:
    async def test() -> None:
        server = Server()
        wake = slow_down_ticks(server, seconds=_FOR_EVER)
        running = asyncio.create_task(server.main_loop())
        await server.ticked.wait()
        assert not running.done()
        server.should_exit = True
        wake()
        await running
        assert server.counters == [0, 0]

    asyncio.run(test())


def test_a_server_that_is_woken_without_need_goes_on_waiting() -> None:
    async def test() -> None:
        server = Server()
        wake = slow_down_ticks(server, seconds=_FOR_EVER)
        running = asyncio.create_task(server.main_loop())
        for ticks in (1, 2):
            await server.ticked.wait()
            server.ticked.clear()
            assert len(server.counters) == ticks
            wake()
        await server.ticked.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(server.counters) == 3
        running.cancel()

    asyncio.run(test())


def test_without_being_woken_it_ticks_again_when_it_is_time() -> None:
    async def test() -> None:
        server = Server()
        slow_down_ticks(server, seconds=0.001)
        running = asyncio.create_task(server.main_loop())
        while len(server.counters) < 3:
            await server.ticked.wait()
            server.ticked.clear()
        server.should_exit = True
        await running

    asyncio.run(test())


def test_uvicorn_ticks_as_we_do_and_its_signal_handler_is_a_method_of_the_server() -> None:
    main_loop = inspect.getsource(uvicorn.Server.main_loop)
    assert "await self.on_tick(counter)" in main_loop
    assert "await asyncio.sleep(0.1)" in main_loop
    on_tick = inspect.getsource(uvicorn.Server.on_tick)
    assert "if counter % 10 == 0:" in on_tick
    assert "if self.should_exit:\n            return True" in on_tick
    assert "signal.signal(sig, self.handle_exit)" in inspect.getsource(uvicorn.Server.capture_signals)
    serve = inspect.getsource(uvicorn.Server._serve)
    assert serve.index("self.startup(") < serve.index("self.main_loop()"), "the lifespan begins before the loop"
