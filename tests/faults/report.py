"""docs/reliability.md: what a run did and saw, and where it ran."""

from collections.abc import Iterable, Mapping
from typing import Any

from tests.faults.injection import HANG_SECONDS
from tests.faults.suite import Result

_INTRODUCTION = """\
# Reliability

Written by `make test-faults`, and by nothing else: a real server under mixed traffic while its processes are killed and
stopped, seeded, with every answer compared. `tests/faults/` is the suite; a short form of it is in `make test`.

**The oracle.** Before anything happens the server answers each question once, alone. Every later answer, in whatever
company, by whatever manner of client, streamed or not, during the faults and after them, has to be that answer: text,
token ids, ends, log-probabilities, usage, one end for each choice, and as many tokens as the usage says. Else it must
be one honest error: refused with a time to come back (429, 503, 408), or failed (500) while a worker had died."""
_ROUNDING = {
    "float64": """\
**Rounding.** PyTorch's kernels compute, in float64. Their sums of float32 can come out otherwise in another batch, by
about 3e-6 in log-probability, and a draw that falls so close to its neighbour's share can then differ; in float64 such
a difference is a billion times smaller. Log-probabilities are compared to 1e-5.""",
    "float32": """\
**Rounding.** There is none to allow for: our own kernels compute, in float32, and a row's bits are its own. Numbers are
compared to the last bit.""",
}


def page(result: Result, where: Mapping[str, Any]) -> str:
    """The page. `where`: command, date, commit, machine and versions."""
    tally, machine = result.tally, where["machine"]
    sections = [
        _INTRODUCTION,
        _ROUNDING[result.plan.dtype],
        f"`{where['command']}`, {where['date']}, commit {where['commit']}, {machine['processor']}, "
        f"{machine['cores']} cores, torch {where['versions']['torch']}",
        _verdict(result),
        "## Requests",
        _table(("question", "asked"), sorted(tally.asked.items())),
        _table(("manner", "requests"), sorted(tally.manners.items())),
        _table(("ending", "requests"), sorted(tally.endings.items())),
        "## Faults",
        _table(("fault", "times"), sorted(result.fault_counts.items())),
        "## Clients that left",
        "Each at one of six moments, from before its first byte to after the last of the answer. Computed is what the "
        "engine counts, sent what left the server, wasted `llm_wasted_tokens_total`.",
        _table(
            ("they asked for", "clients", "tokens computed", "sent", "wasted"),
            [(d.kind, d.num_clients, d.num_generated, d.num_sent, d.num_wasted) for d in result.departures],
        ),
        "## What is left",
        _table(("", "before", "after"), _left(result)),
    ]
    return "\n\n".join(sections) + "\n"


def _verdict(result: Result) -> str:
    tally = result.tally
    lines = [
        f"**{tally.num_compared:,} answers compared, {tally.num_tokens:,} tokens of them; "
        f"{sum(result.fault_counts.values())} faults, {result.counted['worker_restarts_total']:g} deaths of a worker; "
        f"{len(result.complaints)} complaints.** The longest silence within a stream was {tally.longest_gap:.2f} s: a "
        f"worker that hangs is noticed after {HANG_SECONDS:g}, and one that dies takes a pause, too."
    ]
    if result.complaints:
        lines += ["", "What was wrong:", "", *(f"- {complaint}" for complaint in result.complaints[:20])]
    return "\n".join(lines)


def _left(result: Result) -> Iterable[tuple[object, ...]]:
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    yield "requests, blocks of the KV-cache", 0, 0
    yield "asyncio tasks of the API process", before.num_tasks, after.num_tasks
    yield "its open files and sockets (a worker's queue is one, up to eight)", before.num_files, after.num_files
    yield "its memory, MiB", before.api_bytes >> 20, after.api_bytes >> 20
    yield "the worker's memory, MiB", before.worker_bytes >> 20, after.worker_bytes >> 20
    yield "processes, when the server had ended", f"{result.num_processes} in all", result.num_orphans


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" if not place else "---:" for place in range(len(head))), *rows]
    return "\n".join(f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in line)} |" for line in lines)
