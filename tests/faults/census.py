"""What a server holds, as it tells at /metrics and as the operating system tells."""

import asyncio
import re
import time
from dataclasses import dataclass

from tests.e2e.process import Service

_SAMPLE = re.compile(r"llm_(\w+)(?:\{(.*)\})? (\S+)")
# What no server keeps when it has nothing to do.
_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "api_requests")


async def metrics(service: Service) -> dict[str, float]:
    """Its own metrics, summed over their labels; `name{label}` where a label has a telling value."""
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
    """An idle server. Memory is resident, in bytes."""

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
    """Wait until it has nothing to do and holds nothing; its metrics then.

    Raises:
        TimeoutError: it goes on holding something; says what.
    """
    deadline = time.monotonic() + seconds
    while True:
        now = await metrics(service)
        held = {name: now[name] for name in _IDLE if now[name]}
        if not held:
            return now
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seconds:g} s after the last client had left, the server still holds {held}")
        await asyncio.sleep(0.1)


async def back_to(before: Census, service: Service, *, seconds: float = 60.0) -> Census:
    """Wait until it holds no more files and tasks than before, or so long; what it holds in the end."""
    deadline = time.monotonic() + seconds
    while True:
        now = await Census.of(service)
        is_back = now.num_files <= before.num_files and now.num_tasks <= before.num_tasks
        if is_back or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.2)
