"""What `kvasir bench` measures: a batch at a context, and a prompt of a length; what each repeat showed, as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.closed_loop import EngineRun
from loadtest.spread import Spread
from loadtest.step_work import Machine, Work


@dataclass(slots=True)
class DecodePoint:
    """So many sequences, each of `context_length` tokens in the mean of the steps that are timed.

    work: of one step.
    bounds: the least seconds it can take, by each round's probe.
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
        return f"{self.batch_size} × {self.context_length}"

    def add(self, run: EngineRun, machine: Machine) -> None:
        """One more repeat. Raises ValueError: the sequences never ran all at once."""
        self.step_seconds.append(run.full_step_seconds)
        self.bounds.append(self.work.bound_seconds(machine))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
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
    """A prompt of so many tokens that nobody had before, alone in the engine, until its first token."""

    prompt_tokens: int
    work: Work
    seconds: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"prompt {self.prompt_tokens}"

    def add(self, runs: Sequence[EngineRun], machine: Machine) -> None:
        """One more repeat: the mean of a few runs."""
        self.seconds.append(sum(seconds for run in runs for seconds in run.ttft_seconds) / len(runs))
        self.bounds.append(self.work.bound_seconds(machine))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "prompt_tokens": self.prompt_tokens,
            **self.work.to_dict(),
            "ttft_ms": _spread(1e3 * seconds for seconds in self.seconds),
            "tokens_per_second": _spread(self.prompt_tokens / seconds for seconds in self.seconds),
            "of_the_roofline": Spread.of_ratios(self.bounds, self.seconds).to_dict(),
        }


def _spread(values: Iterator[float] | Sequence[float]) -> dict[str, Any]:
    return Spread(tuple(values)).to_dict()
