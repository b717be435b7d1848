"""One run of the fault suite: reference responses, responses during and after faults, and resources at the end."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.client.outcome import LoadRun
from tests.e2e.process import Service, alive, serving_anew
from tests.faults.census import Census, back_to, idle
from tests.faults.disconnects import RESUME_SECONDS, Departures, Kind, askable, depart
from tests.faults.injection import FLAGS, Event, Fault, Injection, watched
from tests.faults.oracle import Oracle
from tests.faults.questions import questions
from tests.faults.traffic import Tally, Traffic

# Whether native kernels compute, by dtype. Native kernels are batch-invariant. PyTorch's kernels are not: with float64
# their rounding differs too little between batches to change a sampled token.
IS_NATIVE = {"float64": False, "float32": True}
# Few slots and a short queue, so that requests of many clients wait, are preempted, and are rejected.
SERVER = (
    *("--max-num-running", "12", "--max-batched-tokens", "256", "--max-waiting-requests", "40"),
    *("--target-queue-seconds", "20", "--resume-seconds", f"{RESUME_SECONDS:g}", "--standby", *FLAGS),
)
# Permitted growth of memory, for caches and memory that the allocator keeps.
_ROOM_BYTES = 96 * 2**20
# Time after the end of the server within which all of its processes must end.
_ORPHAN_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Size of a run.

    seconds: duration of the fault injection; each fault is injected at least once.
    mean_seconds: mean time between two faults.
    dtype: a key of `IS_NATIVE`.
    """

    dtype: str
    seconds: float
    seed: int
    num_questions: int
    num_clients: int
    num_departures: int
    flood: int
    mean_seconds: float


@dataclass(slots=True)
class Result:
    """Requests, faults, resources and errors of a run."""

    plan: Plan
    tally: Tally
    load: LoadRun | None = None  # of the clients that read without delay, during the faults
    faults: list[Event] = field(default_factory=list)
    departures: list[Departures] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)  # totals of the server's metrics
    before: Census | None = None
    after: Census | None = None
    num_processes: int = 0  # all processes that the server has started
    num_orphans: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def fault_counts(self) -> Counter[str]:
        return Counter(event.name for event in self.faults)


def run(checkpoint: Path, directory: Path, plan: Plan, *flags: str) -> Result:
    """Start a server, run the plan, and stop it."""
    seen: dict[int, psutil.Process] = {}
    arguments = (*SERVER, "--dtype", plan.dtype, *flags)
    with serving_anew(checkpoint, directory, *arguments, program="tests.e2e.checked") as service:
        assert (service.get("/ready").json()["level"] is not None) == IS_NATIVE[plan.dtype]
        result = asyncio.run(_run(service, plan, seen))
        log = service.log
        if service.stop() != 0:
            result.complaints.append("the server did not end with exit code 0")
        psutil.wait_procs(alive([*seen.values()]), timeout=_ORPHAN_SECONDS)
        result.num_processes, result.num_orphans = len(seen) + 1, len(alive([*seen.values()]))
    if result.num_orphans:
        result.complaints.append(f"{result.num_orphans} processes outlived the server")
    if "Traceback" in log.read_text():
        result.complaints.append("there is a traceback in the server's log")
    return result


async def _run(service: Service, plan: Plan, seen: dict[int, psutil.Process]) -> Result:
    asked, choose = questions(plan.seed, plan.num_questions), random.Random(plan.seed)
    traffic = Traffic(int(service.url.rpartition(":")[2]), asked, Oracle(to_the_bit=IS_NATIVE[plan.dtype]))
    result = Result(plan, traffic.tally)
    async with watched(service, seen):
        await traffic.learn(at_once=1)
        result.before = await _census(service)
        began = time.perf_counter(), time.process_time()
        injection = await _disturb(service, traffic, plan, choose)
        result.load = LoadRun.ended_now(list(traffic.tally.outcomes), *began)
        result.faults = injection.events
        result.complaints += _unexplained(injection, traffic.tally)
        await idle(service)
        result.departures = [
            await depart(service, kind, askable(asked, kind), plan.num_departures // len(Kind), choose) for kind in Kind
        ]
        await traffic.check_all(choose, at_once=1)
        await traffic.check_all(choose, at_once=8)
        result.counted = await idle(service)
        result.after = await back_to(result.before, service)
    result.complaints += [*traffic.tally.complaints, *_left(result), *_miscounted(result)]
    return result


async def _census(service: Service) -> Census:
    await idle(service)
    return await Census.of(service)


async def _disturb(service: Service, traffic: Traffic, plan: Plan, choose: random.Random) -> Injection:
    async def flood(service: Service, choose: random.Random) -> bool:
        await traffic.flood(plan.flood, choose)
        return True

    faults = Injection(service, choose, more=[Fault("flood", 0, flood)], mean_seconds=plan.mean_seconds)
    over = asyncio.Event()

    async def disturb() -> None:
        try:
            await faults.run(time.monotonic() + plan.seconds)
        finally:
            over.set()

    clients = (traffic.client(random.Random(f"{plan.seed} {number}"), over) for number in range(plan.num_clients))
    await asyncio.gather(disturb(), *clients)
    return faults


def _unexplained(injection: Injection, tally: Tally) -> Sequence[str]:
    num = sum(not injection.explains(*times) for times in tally.casualties)
    return [f"{num} answers failed while no worker died"] if num else []


def _left(result: Result) -> Iterator[str]:
    """Yield an error for each resource of which the server holds more than before."""
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    if after.num_files > before.num_files:
        yield f"the API process holds {after.num_files} files, {before.num_files} before"
    if after.num_tasks > before.num_tasks:
        yield f"the API process has {after.num_tasks} tasks, {before.num_tasks} before"
    if after.api_bytes > before.api_bytes + _ROOM_BYTES:
        yield f"the API process holds {after.api_bytes >> 20} MiB, {before.api_bytes >> 20} before"
    if after.worker_bytes > before.worker_bytes + _ROOM_BYTES:
        yield f"the worker holds {after.worker_bytes >> 20} MiB, {before.worker_bytes >> 20} before"


def _miscounted(result: Result) -> Iterator[str]:
    """Yield an error for each metric of the server that differs from the counts of the suite."""
    restarts, deaths = result.counted["worker_restarts_total"], sum(event.num_deaths for event in result.faults)
    if restarts != deaths:
        yield f"{restarts:g} workers were replaced, {deaths} died"
    for left in result.departures:
        if left.num_generated != left.num_sent + left.num_wasted:
            yield (f"{left.kind}: {left.num_generated} tokens computed, {left.num_sent} sent, {left.num_wasted} wasted")
