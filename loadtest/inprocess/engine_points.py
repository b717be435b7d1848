"""Points of `kvasir bench`: a batch at a context, and a prompt of a length, with the figures of each repeat."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.inprocess.closed_loop import EngineRun
from loadtest.measurement.spread import Spread
from loadtest.measurement.step_work import Machine, Work


@dataclass(slots=True)
class DecodePoint:
    """A batch of sequences with a mean of `context_length` tokens over the timed steps.

    work: bytes and FLOPs of one step.
    bounds: least seconds of a step, by each round's probe.
    """

    batch_size: int
    context_length: int
    prompt_tokens: int
    output_tokens: int
    work: Work
    step_seconds: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Label for the progress bar."""
        return f"{self.batch_size} × {self.context_length}"

    def add(self, run: EngineRun, machine: Machine) -> None:
        """Add a repeat. Raises ValueError if the sequences never ran all at once."""
        self.step_seconds.append(run.full_step_seconds)
        self.bounds.append(self.work.bound_seconds(machine))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        rates = [self.batch_size / seconds for seconds in self.step_seconds]
        return {
            "batch_size": self.batch_size,
            "context_length": self.context_length,
            **self.work.to_dict(),
            "step_ms": _spread(1e3 * seconds for seconds in self.step_seconds),
            "tokens_per_second": _spread(rates),
            "of_the_roofline": Spread.of_ratios(self.bounds, self.step_seconds).to_dict(),
        }


@dataclass(slots=True)
class PromptPoint:
    """A prompt without a cached prefix, alone in the engine, until its first token."""

    prompt_tokens: int
    work: Work
    seconds: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Label for the progress bar."""
        return f"prompt {self.prompt_tokens}"

    def add(self, runs: Sequence[EngineRun], machine: Machine) -> None:
        """Add a repeat: the mean of a few runs."""
        self.seconds.append(sum(seconds for run in runs for seconds in run.ttft_seconds) / len(runs))
        self.bounds.append(self.work.bound_seconds(machine))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "prompt_tokens": self.prompt_tokens,
            **self.work.to_dict(),
            "ttft_ms": _spread(1e3 * seconds for seconds in self.seconds),
            "tokens_per_second": _spread(self.prompt_tokens / seconds for seconds in self.seconds),
            "of_the_roofline": Spread.of_ratios(self.bounds, self.seconds).to_dict(),
        }


def _spread(values: Iterator[float] | Sequence[float]) -> dict[str, Any]:
    return Spread(tuple(values)).to_dict()
