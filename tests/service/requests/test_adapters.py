"""Adapters of the service: loaded while a name or an unfinished request uses them, and again by a new worker."""

import msgspec
import pytest

from service.ipc.messages import Cancel, LoadAdapter, Submit, UnloadAdapter
from service.protocol.errors import ModelNotFound
from service.requests.adapters import AdapterRegistry, ServedAdapter
from tests.service.desk import Desk, run
from tests.service.sequences import make_choice, make_hello


def adapter(name: str, key: str) -> ServedAdapter:
    return ServedAdapter(name=name, directory=f"/adapters/{key}", key=key, created_seconds=1, num_bytes=1)


def load(key: str) -> LoadAdapter:
    return LoadAdapter(key=key, directory=f"/adapters/{key}")


def test_an_unloaded_adapter_is_freed_after_its_last_request() -> None:
    registry = AdapterRegistry([adapter("a", "1")])
    assert registry.add(adapter("b", "2")) == [load("2")]
    registry.acquire("2")
    registry.acquire("2")
    assert registry.remove("b") == []
    assert registry.find("b") is None
    assert registry.release("2") == []
    assert registry.load_commands() == [load("1"), load("2")]
    assert registry.release("2") == [UnloadAdapter(key="2")]
    assert registry.load_commands() == [load("1")]
    with pytest.raises(ModelNotFound):
        registry.acquire("2")


def test_names_of_equal_files_share_one_adapter() -> None:
    registry = AdapterRegistry([adapter("a", "1")])
    assert registry.add(adapter("b", "1")) == [load("1")]  # its directory may be another
    assert registry.names(["1", "1"]) == ["a", "b"]
    assert registry.remove("a") == []
    assert registry.remove("b") == [UnloadAdapter(key="1")]


def test_the_base_model_is_no_adapter() -> None:
    registry = AdapterRegistry()
    registry.acquire("")
    assert registry.release("") == []
    assert list(registry) == registry.load_commands() == []


def test_a_request_keeps_its_adapter_and_a_new_worker_gets_it_first() -> None:
    async def test() -> None:
        desk = Desk()
        client = desk.engine_client
        client.load_adapter(adapter("a", "1"))
        choice = make_choice("x")
        choice.submit = msgspec.structs.replace(choice.submit, adapter="1")
        request = desk.submit(choice)
        assert client.adapter_names(has_started=False) == ["a"]
        client.unload_adapter("a")
        assert [type(command) for command in desk.sent] == [LoadAdapter, Submit]
        desk.sent.clear()
        client.receive([make_hello(epoch=1)])
        assert [type(command) for command in desk.sent] == [LoadAdapter, Submit]
        desk.sent.clear()
        client.finish(request)
        client.finish(request)
        assert desk.sent == [Cancel(uid="x"), UnloadAdapter(key="1")]
        with pytest.raises(ModelNotFound):
            desk.submit(choice)
        assert client.num_requests == 0

    run(test)
