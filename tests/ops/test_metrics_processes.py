"""Metrics of several processes form one scrape: spawned, forked, dead and replaced processes."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from service.metrics.recorder import WORKER, Metrics, mark_dead
from tests.ops.observations import MODEL, STEP, finished, observe_everything, scrape

_DEADLINE_SECONDS = 250


class Worker:
    """A spawned process that observes, and then lives until the test ends it."""

    def __init__(self, observe: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_observe_and_wait, args=(observe, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self._ours.poll(_DEADLINE_SECONDS)
        assert self._ours.recv() == "observed"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """Kill the process as a crash would: no exit handler runs."""
        self.process.kill()
        self.process.join(_DEADLINE_SECONDS)
        assert not self.process.is_alive()
        self._ours.close()
        self.process.close()


def _observe_and_wait(observe: Callable[[], None], connection: Connection) -> None:
    observe()
    connection.send("observed")
    connection.poll(None)


def observe_all_once() -> None:
    observe_everything(Metrics(MODEL))


def observe_two_finishes() -> None:
    metrics = Metrics(MODEL)
    finished(metrics)
    finished(metrics, e2e_seconds=1.0)


def observe_a_busy_step() -> None:
    Metrics(MODEL).observe_step(msgspec.structs.replace(STEP, num_running=9))


def observe_all_once_as_the_worker() -> None:
    observe_everything(Metrics(MODEL, process=WORKER))


def test_counters_and_histograms_of_processes_add_up(metrics: Metrics) -> None:
    workers = [Worker(observe_all_once), Worker(observe_two_finishes)]
    finished(metrics)
    samples = scrape()
    assert samples['request_success_total{finished_reason="stop"}'] == 4
    assert samples["e2e_request_latency_seconds_count"] == 4
    assert samples["e2e_request_latency_seconds_sum"] == 0.5 * 3 + 1.0
    assert samples['e2e_request_latency_seconds_bucket{le="0.5"}'] == 3
    assert samples['e2e_request_latency_seconds_bucket{le="1.0"}'] == 4
    assert samples["generation_tokens_total"] == STEP.num_completion_tokens
    for worker in workers:
        worker.kill()
    assert scrape()['request_success_total{finished_reason="stop"}'] == 4


def test_gauges_of_a_dead_worker_vanish_and_its_counters_stay(metrics: Metrics) -> None:
    worker = Worker(observe_all_once)
    pid = worker.pid
    assert scrape()["num_requests_running"] == STEP.num_running
    worker.kill()
    mark_dead(pid)
    samples = scrape()
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "startup_seconds"):
        assert gauge not in samples
    assert samples["generation_tokens_total"] == STEP.num_completion_tokens


def test_the_newest_worker_speaks_for_the_engine(metrics: Metrics) -> None:
    first, second = Worker(observe_all_once), Worker(observe_a_busy_step)
    assert scrape()["num_requests_running"] == 9
    dead = first.pid
    first.kill()
    mark_dead(dead)
    assert scrape()["num_requests_running"] == 9
    second.kill()


def test_one_worker_after_the_other_needs_no_more_room(metrics: Metrics) -> None:
    """Replaced workers must not need more disk space: on a full disk the next worker would die with SIGBUS."""
    directory = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])

    def taken() -> dict[str, int]:
        stats = {path.name: path.stat() for path in directory.glob(f"*_{WORKER}.db")}
        assert all(stat.st_blocks * 512 == stat.st_size for stat in stats.values()), "all of it is there"
        return {name: stat.st_size for name, stat in stats.items()}

    rooms = []
    for number in range(1, 4):
        worker = Worker(observe_all_once_as_the_worker)
        rooms.append(taken())
        samples = scrape()
        assert samples["num_requests_running"] == STEP.num_running
        assert samples["generation_tokens_total"] == number * STEP.num_completion_tokens
        worker.kill()
        mark_dead(WORKER)
        assert "num_requests_running" not in scrape()
        rooms.append(taken())
    assert len(rooms[0]) == 3
    assert rooms == rooms[:1] * 6


_PARENT = """
import multiprocessing, os, sys
import prometheus_client  # before the directory is prepared, as any library may
from service.metrics.recorder import Metrics, prepare_directory, render

directory = prepare_directory()
metrics = Metrics("tales")
metrics.count_worker_restart("exit")

def child():
    metrics.count_cancellation("waiting")
    metrics.count_worker_restart("exit")

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
assert os.path.isdir(directory), "a child's exit removed its parent's directory"
metrics.count_worker_restart("exit")
print(directory)
print(render()[0].decode())
"""


def test_a_fork_counts_for_itself_and_the_directory_goes_with_its_owner() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", _PARENT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_SECONDS,
    )
    directory, _, exposition = done.stdout.partition("\n")
    common = 'engine="0",model_name="tales"'
    assert f'llm_worker_restarts_total{{{common},reason="exit"}} 3.0' in exposition
    assert f'llm_requests_cancelled_total{{{common},phase="waiting"}} 1.0' in exposition
    assert not Path(directory).exists()
