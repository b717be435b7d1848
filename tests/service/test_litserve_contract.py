"""Every private thing of LitServe that we lean on. A new version must pass these before it is pinned."""

import asyncio
import importlib.metadata
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from litserve import LitAPI, LitServer
from litserve.loops import LitLoop, inference_worker
from litserve.server import response_queue_to_buffer
from litserve.specs.base import LitSpec
from litserve.utils import WorkerSetupStatus
from starlette.testclient import TestClient

from service.ipc.channel import Channel


class Loop(LitLoop):  # type: ignore[misc]
    def __call__(self, *args: Any) -> None:
        self.called_with = args


class Spec(LitSpec):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.api_path = "/v1/things"

    @property
    def stream(self) -> bool:
        return True

    def pre_setup(self, lit_api: Any) -> None:
        self.add_endpoint("/v1/things", self.things, ["POST"])
        self.add_endpoint("/other", self.things, ["GET"])

    async def things(self) -> dict[str, int]:
        return {"things": 1}


class API(LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.was_set_up = True

    async def authorize(self) -> None:
        self.was_asked = True


@pytest.fixture(autouse=True)
def _worker_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """LitServe sets it in the worker process, which here is this one."""
    monkeypatch.setenv("LITSERVE_WORKER_ID", "0")


class Server(LitServer):  # type: ignore[misc]
    def _register_internal_endpoints(self) -> None:
        pass


def make_server() -> Any:
    return Server(API(loop=Loop(), spec=Spec()), accelerator="cpu", timeout=False, restart_workers=True)


def test_the_version_is_the_one_these_tests_were_written_for() -> None:
    assert importlib.metadata.version("litserve") == "0.2.19"


def test_a_worker_calls_our_loop_once_with_everything_after_setup() -> None:
    loop, statuses = Loop(), {"things_0": WorkerSetupStatus.STARTING}
    api = API(loop=loop, spec=Spec())
    runner = SimpleNamespace(trigger_event=lambda *args, **kwargs: None)
    inference_worker(api, "cpu", 0, "queue", "transport", statuses, runner, True)
    assert loop.called_with == (api, "cpu", 0, "queue", "transport", statuses, runner)
    assert api.was_set_up
    assert statuses == {"things_0": WorkerSetupStatus.READY}


def test_setup_may_end_the_worker_by_system_exit() -> None:
    class Broken(API):
        def setup(self, device: str) -> None:
            raise SystemExit(3)

    statuses = {"things_0": WorkerSetupStatus.STARTING}
    runner = SimpleNamespace(trigger_event=lambda *args, **kwargs: None)
    with pytest.raises(SystemExit):
        inference_worker(Broken(loop=Loop(), spec=Spec()), "cpu", 0, None, None, statuses, runner, True)
    assert statuses == {"things_0": WorkerSetupStatus.STARTING}


def test_the_reader_waits_in_our_transport_and_ends_when_it_is_cancelled() -> None:
    async def test() -> None:
        channel, buffer = Channel(), dict[str, Any]()
        reader = asyncio.create_task(response_queue_to_buffer(channel, buffer, 0, make_server().litapi_connector))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not reader.done()
        reader.cancel()
        await reader
        channel.close()

    asyncio.run(test())


def test_the_spec_owns_the_routes_and_litserve_adds_none() -> None:
    server = make_server()
    client = TestClient(server.app)  # without `with`: no lifespan, hence no transport
    assert client.post("/v1/things").json() == client.get("/other").json() == {"things": 1}
    assert server.lit_api.was_asked, "authorize is the routes' dependency"
    for path in ("/", "/health", "/info", "/predict", "/shutdown"):
        assert client.get(path).status_code == client.post(path).status_code == 404


def test_a_worker_works_without_the_spec_if_it_knows_the_path() -> None:
    api = API(loop=Loop(), spec=Spec(), api_path="/v1/things")
    api._spec = None
    copy = pickle.loads(pickle.dumps(api))
    runner = SimpleNamespace(trigger_event=lambda *args, **kwargs: None)
    statuses = {"things_0": WorkerSetupStatus.STARTING}
    inference_worker(copy, "cpu", 0, None, None, statuses, runner, True)
    assert statuses == {"things_0": WorkerSetupStatus.READY}
    assert copy.loop.called_with[0] is copy


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_init_manager", ["self", "num_api_servers"]),
        ("verify_worker_status", ["self"]),
        ("_start_worker_monitoring", ["self", "manager", "uvicorn_workers"]),
        ("lifespan", ["self", "app"]),
        (
            "_start_server",
            ["self", "port", "num_uvicorn_servers", "log_level", "sockets", "uvicorn_worker_type", "kwargs"],
        ),
    ],
)
def test_what_we_override_has_this_signature_and_is_called_by_run(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(LitServer, name)).parameters) == parameters
    callers = (LitServer.run, LitServer.__init__)
    assert any(f"self.{name}" in inspect.getsource(caller) for caller in callers)


def test_run_waits_on_the_shutdown_event_and_then_ends_api_process_and_workers_in_that_order() -> None:
    run = inspect.getsource(LitServer.run)
    assert "self._shutdown_event.wait()" in run
    assert "self.inference_workers.extend" in run
    assert run.index("_init_manager") < run.index("verify_worker_status") < run.index("_start_server")
    end = inspect.getsource(LitServer._perform_graceful_shutdown)
    assert end.index("uvicorn_workers.items()") < end.index("self.inference_workers") < end.index("manager.shutdown")
    assert "self.uvicorn_graceful_timeout" in end


def test_the_manager_process_is_used_only_where_we_replace_it() -> None:
    """`_init_manager` makes it; states, shutdown event, queues and transport come from it."""
    users = {name for name, value in vars(LitServer).items() if "manager." in source_of(value)}
    assert users == {"_init_manager", "_perform_graceful_shutdown"}
    readers = {name for name, value in vars(LitServer).items() if "workers_setup_status" in source_of(value)}
    assert readers == {
        *("_init_manager", "verify_worker_status", "_register_internal_endpoints"),
        *("launch_inference_worker", "launch_single_inference_worker"),
    }
    assert "if workers_setup_status:\n" in inspect.getsource(inference_worker), "an empty table stays empty"


def source_of(value: object) -> str:
    return inspect.getsource(value) if inspect.isfunction(value) else ""


def test_a_worker_is_put_where_the_monitor_puts_it() -> None:
    """We do what the monitor does, without asking twenty times a second whether to go on."""
    monitor = inspect.getsource(LitServer._start_worker_monitoring)
    assert "while not self._shutdown_event.is_set()" in monitor
    assert "self.inference_workers[idx] = self.launch_single_inference_worker(lit_api, worker_id)" in monitor
    assert make_server().restart_workers is True


def test_workers_are_spawned_and_api_processes_forked() -> None:
    assert 'get_context("spawn")' in inspect.getsource(LitServer.launch_inference_worker)
    assert 'get_context("fork")' in inspect.getsource(LitServer._start_server)


def test_whoever_starts_a_worker_asks_for_its_queue_and_so_does_the_spec() -> None:
    assert list(inspect.signature(LitServer._get_request_queue).parameters) == ["self", "api_path"]
    for asker in (LitServer.launch_inference_worker, LitServer.launch_single_inference_worker):
        assert "self._get_request_queue(lit_api.api_path)" in inspect.getsource(asker)
    assert "server._get_request_queue(self.api_path)" in inspect.getsource(LitSpec.setup)


def test_a_worker_gets_the_api_object_itself_so_that_what_we_hang_on_it_arrives() -> None:
    source = inspect.getsource(LitServer.launch_single_inference_worker)
    assert "target=inference_worker,\n            args=(\n                lit_api,\n" in source
    assert source.rstrip().endswith("process.start()\n        return process")


def test_the_api_process_is_started_by_the_thread_that_runs() -> None:
    """The kernel ends a child with the thread that started it: that one must last as long as main."""
    assert "uvicorn_workers = self._start_server(" in inspect.getsource(LitServer.run)


def test_the_transport_is_taken_from_the_server() -> None:
    assert "transport = self._transport\n" in inspect.getsource(LitServer.lifespan)
    assert "await transport.areceive(consumer_id)\n" in inspect.getsource(response_queue_to_buffer)
    assert "self._transport.close(send_sentinel=True)" in inspect.getsource(LitServer._perform_graceful_shutdown)
