"""Resources that a server holds, by /metrics and by the operating system."""

import asyncio
import re
import time
from dataclasses import dataclass

from tests.e2e.process import Service

_SAMPLE = re.compile(r"llm_(\w+)(?:\{(.*)\})? (\S+)")
# Gauges that are 0 in an idle server.
_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "api_requests")


async def metrics(service: Service) -> dict[str, float]:
    """Return the service's metrics by name, summed over labels; also `name{value}` for labels reason, outcome, by."""
    text = await asyncio.to_thread(lambda: service.get("/metrics").text)
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if (match := _SAMPLE.fullmatch(line)) is not None:
            name, labels, value = match[1], match[2] or "", float(match[3])
            sums[name] = sums.get(name, 0.0) + value
            for reason in re.findall(r'(?:reason|outcome|by)="(\w+)"', labels):
                sums[f"{name}{{{reason}}}"] = sums.get(f"{name}{{{reason}}}", 0.0) + value
    return sums


@dataclass(frozen=True, slots=True)
class Census:
    """Resources of an idle server: resident bytes, and the API process's open files and asyncio tasks."""

    api_bytes: int
    worker_bytes: int
    num_files: int
    num_tasks: int

    @classmethod
    async def of(cls, service: Service) -> "Census":
        tasks = (await metrics(service))["api_tasks"]
        api, worker = service.api, service.worker
        return cls(api.memory_info().rss, worker.memory_info().rss, api.num_fds(), int(tasks))


async def idle(service: Service, *, seconds: float = 120.0) -> dict[str, float]:
    """Wait until the service has no request and holds no KV-cache block. Return its metrics.

    Raises:
        TimeoutError: the service is not idle after `seconds`. The message names the gauges that are not 0.
    """
    deadline = time.monotonic() + seconds
    while True:
        now = await metrics(service)
        held = {name: now[name] for name in _IDLE if now[name]}
        if not held:
            return now
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seconds:g} s after the last client disconnected, the server is not idle: {held}")
        await asyncio.sleep(0.1)


async def back_to(before: Census, service: Service, *, seconds: float = 60.0) -> Census:
    """Wait at most `seconds` until the service holds no more files and tasks than before. Return its resources."""
    deadline = time.monotonic() + seconds
    while True:
        now = await Census.of(service)
        is_back = now.num_files <= before.num_files and now.num_tasks <= before.num_tasks
        if is_back or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.2)
