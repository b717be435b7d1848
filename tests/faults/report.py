"""Writer of docs/reliability.md: the requests, faults and results of a run, and its machine."""

from collections.abc import Iterable, Mapping
from typing import Any

from loadtest.client.report import Slo, markdown, summarize
from tests.faults.injection import HANG_SECONDS
from tests.faults.suite import Result

_INTRODUCTION = """\
# Reliability

`make test-faults` generates this page. It runs a real server under mixed traffic, kills and stops the server's
processes, and compares every response. A seed makes the run repeatable. The suite is in `tests/faults/`, and `make
test` runs a short version of it.

**Reference responses.** Before any fault, the server completes each request once, alone. Every later response must
equal this reference, in any batch, for every kind of client, streamed or not, during faults and after them. Compared
are text, token ids, finish reasons, logprobs and usage. Each choice must end exactly once, with as many tokens as its
usage reports. The only other permitted outcome is one well-formed error: rejected with a Retry-After (429, 503, 408),
or failed (500) after a worker died."""
_ROUNDING = {
    "float64": """\
**Rounding.** The server computes with PyTorch's kernels in float64. In float32 their sums can round differently in
another batch, by about 3e-6 in logprob. A sample that falls within this distance of the boundary between two tokens
can then differ. In float64 the difference is a billion times smaller. Logprobs are compared to 1e-5.""",
    "float32": """\
**Rounding.** The server computes with the native kernels in float32. These kernels are batch-invariant, so numbers
must be bitwise identical.""",
}


def page(result: Result, where: Mapping[str, Any]) -> str:
    """Return the page. `where` has command, date, commit, machine and versions."""
    tally, machine = result.tally, where["machine"]
    assert result.load is not None
    sections = [
        _INTRODUCTION,
        _ROUNDING[result.plan.dtype],
        f"`{where['command']}`, {where['date']}, commit {where['commit']}, {machine['processor']}, "
        f"{machine['cores']} cores, torch {where['versions']['torch']}",
        _verdict(result),
        "## Requests",
        _table(("request type", "requests"), sorted(tally.asked.items())),
        _table(("client behaviour", "requests"), sorted(tally.manners.items())),
        _table(("outcome", "requests"), sorted(tally.endings.items())),
        "## Faults",
        _table(("fault", "times"), sorted(result.fault_counts.items())),
        "## Latency during the faults",
        "Of the requests whose clients read without delay, in the terms of [the load test](loadtest.md#terms). A "
        f"hung worker is detected after {HANG_SECONDS:g} s, and replacing a dead worker also pauses its streams. The "
        f"longest pause within a stream was {_longest_pause(result):.2f} s.",
        markdown([summarize(result.load, label="faults", slo=Slo(max_failed_share=None))]),
        "## Clients that disconnected",
        "Each client disconnects at one of six moments, from before the first byte of the response to after the last. "
        "*Computed* counts tokens computed by the engine, *sent* counts tokens sent by the server, and *wasted* is "
        "`llm_wasted_tokens_total`.",
        _table(
            ("response type", "clients", "tokens computed", "sent", "wasted"),
            [(d.kind, d.num_clients, d.num_generated, d.num_sent, d.num_wasted) for d in result.departures],
        ),
        "## Resources before and after",
        _table(("", "before", "after"), _left(result)),
    ]
    return "\n\n".join(sections) + "\n"


def _verdict(result: Result) -> str:
    tally = result.tally
    lines = [
        f"**{tally.num_compared:,} responses compared, with {tally.num_tokens:,} tokens; "
        f"{sum(result.fault_counts.values())} faults, {result.counted['worker_restarts_total']:g} worker deaths; "
        f"{len(result.complaints)} errors found.**"
    ]
    if result.complaints:
        lines += ["", "Errors found:", "", *(f"- {complaint}" for complaint in result.complaints[:20])]
    return "\n".join(lines)


def _longest_pause(result: Result) -> float:
    return max((gap for outcome in result.tally.outcomes for gap in outcome.itl_seconds), default=0.0)


def _left(result: Result) -> Iterable[tuple[object, ...]]:
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    yield "requests, blocks of the KV-cache", 0, 0
    yield "asyncio tasks of the API process", before.num_tasks, after.num_tasks
    yield "open files and sockets of the API process", before.num_files, after.num_files
    yield "memory of the API process, MiB", before.api_bytes >> 20, after.api_bytes >> 20
    yield "memory of the worker, MiB", before.worker_bytes >> 20, after.worker_bytes >> 20
    yield "processes after the server ended", f"{result.num_processes} started in total", result.num_orphans


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" if not place else "---:" for place in range(len(head))), *rows]
    return "\n".join(f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in line)} |" for line in lines)
