"""LoRA adapters of the service: their names, and the adapters that workers must keep for unfinished requests."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from service.ipc.messages import Command, LoadAdapter, UnloadAdapter
from service.protocol.errors import ModelNotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """LoRA adapter that requests can name as their model. `key`: digest of the adapter's files.

    created_seconds: time of loading, or of the last change of a --lora directory, in seconds since 1970.
    num_bytes: size of its numbers in float32.
    """

    name: str
    directory: str
    key: str
    created_seconds: int
    num_bytes: int


def loading_bytes(sizes: Collection[int]) -> int:
    """Return the peak memory, in bytes, for loading adapters of these sizes (`ServedAdapter.num_bytes`) one by one.

    While an adapter is loaded, its file and its packed copy are in memory too.
    """
    return sum(sizes) + 2 * max(sizes, default=0)


class AdapterRegistry:
    """Adapters by name, and the number of unfinished requests by adapter key. Only the API process changes it.

    An adapter whose names were removed stays loaded until the last request that uses it ends. Some methods return
    commands, which the caller must send to the worker. The worker handles commands in order and does not answer.
    """

    def __init__(self, adapters: Iterable[ServedAdapter] = ()) -> None:
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._loaded = {adapter.key: adapter.directory for adapter in self._by_name.values()}
        self._uses = Counter[str]()

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._by_name.values())

    def find(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    def names(self, keys: Iterable[str]) -> list[str]:
        """Return the names of the adapters with these keys, in alphabetical order. A removed name is left out."""
        wanted = set(keys)
        return sorted(adapter.name for adapter in self._by_name.values() if adapter.key in wanted)

    def add(self, adapter: ServedAdapter) -> list[Command]:
        """Add an adapter. Return the command to load it, which a worker that has loaded its key ignores."""
        self._by_name[adapter.name] = adapter
        self._loaded[adapter.key] = adapter.directory
        return [LoadAdapter(key=adapter.key, directory=adapter.directory)]

    def remove(self, name: str) -> list[Command]:
        """Remove a name, which must exist. Return the command to unload the adapter, or [] while it is still used."""
        return self._free(self._by_name.pop(name).key)

    def acquire(self, key: str) -> None:
        """Count a request that uses an adapter, unless `key` is "", the base model.

        Raises ModelNotFound if the adapter has been unloaded.
        """
        if not key:
            return
        if key not in self._loaded:
            raise ModelNotFound("the adapter has been unloaded; name another model", param="model")
        self._uses[key] += 1

    def release(self, key: str) -> list[Command]:
        """Count the end of a request that `acquire` has counted.

        Return the command to unload its adapter if no name and no other request uses it any more, else [].
        """
        if not key:
            return []
        self._uses[key] -= 1
        return self._free(key)

    def load_commands(self) -> list[Command]:
        """Return the commands that make a new worker load all adapters. Send them before any request."""
        return [LoadAdapter(key=key, directory=directory) for key, directory in self._loaded.items()]

    def _free(self, key: str) -> list[Command]:
        if self._uses[key] > 0 or any(adapter.key == key for adapter in self._by_name.values()):
            return []
        del self._uses[key], self._loaded[key]
        return [UnloadAdapter(key=key)]
