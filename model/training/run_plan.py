"""Choice of vocabulary, model size and number of steps for the user's text, time limit and machine.

The sizes follow Hoffmann et al. 2022 (arXiv 2203.15556): each compute budget has an optimal model size, with a fixed
number of training tokens per parameter. A text that is too small for this is repeated, with dropout, as long as
repetition helps. docs/training.md has the measurements behind the constants.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.training.config import TrainConfig
from model.training.data.source_config import SourceConfig
from model.training.run_length import DECAY_SHARE

# A model must see this many tokens per parameter, or this many passes over a small text. With less of both, a smaller
# model reaches a lower loss in the same time.
TOKENS_PER_PARAMETER, ENOUGH_PASSES = 4, 12
PARAMETERS_PER_TOKEN = 16  # upper limit; a larger model overfits the text at once
MOST_PASSES = 24  # over the text; further passes only overfit
FEWEST_STEPS = 40
TRAIN_FILE, HELD_OUT_FILE = "text.jsonl", "held-out.jsonl"
CHECKPOINT_MINUTES = 0.4  # the most that a killed run loses
_MEASUREMENTS = 12  # of the held-out loss, during a run
_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY = 512, 8192
# Dropout starts above the first number of passes. It doubles above the second, for over _LARGE parameters per token.
_FEW_PASSES, _MANY_PASSES, _LARGE = 8, 16, 8
_HEAD_SIZE = 32
# Compiling takes about 30 s and makes steps 1.25 times as fast, which pays off in runs of at least 480 s.
_COMPILE_SECONDS, _SPEEDUP, _COMPILE_FROM_SECONDS = 30.0, 1.25, 480.0
# Time after the last step: the checkpoint files and the loss curve; samples, which are generated without a KV cache.
_FINISHING_SECONDS, _SAMPLE_TOKENS, _SECONDS_A_LAYER = 4.0, 200, 0.001
_LICENCE = "as its owner says"
_RATE, _RATE_WIDTH = 1e-2, 256  # peak rate up to this width; above, inversely proportional to the width


class PlanError(ValueError):
    """The time limit is too short to train any model. The message says how much time is missing."""


@dataclass(frozen=True, slots=True)
class Size:
    """Width and depth of a model, and its batch shape: sequence_length tokens, batch_size sequences per step."""

    width: int
    layers: int
    sequence_length: int
    batch_size: int

    def model(self, vocab_size: int) -> ModelConfig:
        """Return the model config of this size. The architecture is that of the shipped model."""
        heads = self.width // _HEAD_SIZE
        return ModelConfig.from_dict(
            {
                "vocab_size": vocab_size,
                "max_context_length": self.sequence_length,
                "num_layers": self.layers,
                "hidden_size": self.width,
                "num_heads": heads,
                "num_kv_heads": heads // 2 if heads % 2 == 0 else heads,
                "head_dim": _HEAD_SIZE,
                "mlp_size": -(-8 * self.width // 3 // 32) * 32,
                "position": "rotary",
                "rope_theta": 10000.0,
                "norm": "rms_norm",
                "norm_eps": 1e-5,
                "mlp": "swiglu",
                "attention_bias": False,
                "mlp_bias": False,
                "qk_norm": True,
                "tie_embeddings": True,
            }
        )


LADDER = (
    Size(64, 2, 256, 8),
    Size(96, 3, 256, 8),
    Size(128, 4, 256, 8),
    Size(192, 4, 256, 8),
    Size(256, 6, 512, 8),
    Size(384, 8, 512, 16),
    Size(512, 10, 1024, 16),
    Size(768, 12, 1024, 32),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Input of the planner.

    name: of the model. text: name of the text. directory: holds the training text and the held-out text.
    num_tokens, num_held_out_tokens: lengths of the two texts; the second may be 0.
    may_compile: whether torch.compile is available.
    """

    name: str
    text: str
    seed: int
    directory: Path
    vocab_size: int
    num_tokens: int
    num_held_out_tokens: int
    may_compile: bool
    prompts: tuple[str, ...]
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Planned run: its config, and printable reasons for the choices.

    most_steps: limit set by the size of the text. after_seconds: estimated time after the last step.
    """

    config: TrainConfig
    compile: bool
    most_steps: int
    after_seconds: float
    reasons: tuple[str, ...]


def vocabulary_size(num_bytes: int) -> int:
    """Return a power of two proportional to the square root of the text size: 512 for 50 KB, 8,192 from 12 MB on."""
    power = round(math.log2(2.3 * math.sqrt(num_bytes)))
    return min(max(1 << power, _SMALLEST_VOCABULARY), _LARGEST_VOCABULARY)


def make_plan(task: Task, seconds_left: Callable[[], float], seconds_a_step: Callable[[TrainConfig], float]) -> Plan:
    """Measure models of increasing size, and plan a run of the largest that fits the time and the text.

    A size does not fit the time if the run would see fewer than TOKENS_PER_PARAMETER tokens per parameter, and would
    also make fewer than ENOUGH_PASSES passes over the text.

    Args:
        seconds_left: returns the remaining seconds for everything.
        seconds_a_step: measures the seconds per step of a config, without torch.compile.

    Raises:
        PlanError: the time is too short for the smallest model.
    """
    chosen, why = _speed(task, LADDER[0], seconds_a_step), "the largest available size"
    for size in LADDER[1:]:
        parameters = size.model(task.vocab_size).num_parameters
        if parameters > PARAMETERS_PER_TOKEN * task.num_tokens:
            why = "the largest that this amount of text supports"
            break
        speed = _speed(task, size, seconds_a_step)
        tokens = speed.steps(seconds_left()) * size.sequence_length * size.batch_size
        if tokens < min(TOKENS_PER_PARAMETER * parameters, ENOUGH_PASSES * task.num_tokens):
            why = "the largest that sees enough text within the time limit"
            break
        chosen = speed
    left = seconds_left()
    if (possible := chosen.steps(left)) < FEWEST_STEPS:
        needed = FEWEST_STEPS * chosen.seconds + chosen.after - left
        raise PlanError(f"too few --minutes: the smallest model needs {needed:.0f} s more on this machine")
    return _plan(task, chosen, possible, why)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Speed of a model size on this machine. seconds: per step, not compiled. after: seconds after the last step."""

    size: Size
    seconds: float
    after: float
    may_compile: bool

    def compiles(self, left: float) -> bool:
        """Return whether compiling saves time, with `left` seconds remaining."""
        return self.may_compile and left >= _COMPILE_FROM_SECONDS

    def steps(self, left: float) -> int:
        """Return the number of steps that fit into `left` seconds."""
        left -= self.after
        if self.compiles(left + self.after):
            return int((left - _COMPILE_SECONDS) * _SPEEDUP / self.seconds)
        return int(left / self.seconds)


def _speed(task: Task, size: Size, seconds_a_step: Callable[[TrainConfig], float]) -> _Speed:
    seconds = seconds_a_step(_config(task, size, steps=1))
    forward = seconds / (size.sequence_length * size.batch_size) / 3  # per token; the backward pass costs twice as much
    a_sample = _SAMPLE_TOKENS * (_SAMPLE_TOKENS / 2 * forward + _SECONDS_A_LAYER * size.layers)
    after = _FINISHING_SECONDS + task.num_held_out_tokens * forward + len(task.prompts) * a_sample
    return _Speed(size, seconds, after, task.may_compile)


def _plan(task: Task, speed: _Speed, possible: int, why: str) -> Plan:
    tokens_per_step = speed.size.sequence_length * speed.size.batch_size
    most = max(FEWEST_STEPS, MOST_PASSES * task.num_tokens // tokens_per_step)
    config = _config(task, speed.size, steps=min(possible, most))
    model = config.model
    passes = config.steps * tokens_per_step / task.num_tokens
    through = f"{passes:.0f} passes over the text" if passes >= 1.5 else f"{passes:.0%} of the text"
    dropout = f", with dropout {config.dropout} against overfitting" if config.dropout else ""
    reasons = [
        f"model: {model.num_parameters / 1e6:.2g} million parameters, {model.num_layers} layers of width "
        f"{model.hidden_size}, {why}",
        f"training: {config.steps:,} steps of {tokens_per_step:,} tokens, {through}{dropout}",
    ]
    if possible > most:
        reasons.append(f"the run ends before the time limit: over {MOST_PASSES} passes would only overfit the text")
    return Plan(
        config=config,
        compile=speed.may_compile and min(possible, most) * speed.seconds >= _COMPILE_FROM_SECONDS,
        most_steps=most,
        after_seconds=speed.after,
        reasons=tuple(reasons),
    )


def _config(task: Task, size: Size, *, steps: int) -> TrainConfig:
    model = size.model(task.vocab_size)
    passes = steps * size.sequence_length * size.batch_size / task.num_tokens
    held_out = SourceConfig(
        name=task.text, path=task.directory / HELD_OUT_FILE, repeats=0, held_out=1.0, licence=_LICENCE
    )
    rate = _RATE * min(1.0, _RATE_WIDTH / size.width)
    return TrainConfig(
        name=task.name,
        description=task.description,
        seed=task.seed,
        vocab_size=task.vocab_size,
        model=model,
        sources=(
            SourceConfig(
                name=f"{task.text}, to learn from",
                path=task.directory / TRAIN_FILE,
                repeats=1,
                held_out=0.0,
                licence=_LICENCE,
            ),
            *([held_out] if task.num_held_out_tokens else []),
        ),
        sequence_length=size.sequence_length,
        batch_size=size.batch_size,
        steps=steps,
        warmup_steps=min(steps // 4, 10 + steps // 30),
        decay_steps=int(DECAY_SHARE * steps),
        dropout=_dropout(passes, model.num_parameters / task.num_tokens),
        matrix_lr=rate,
        adam_lr=0.6 * rate,
        weight_decay=0.1,
        grad_clip=1.0,
        checkpoint_minutes=CHECKPOINT_MINUTES,
        evaluate_every=max(1, steps // _MEASUREMENTS),
        sample_prompts=task.prompts,
    )


def _dropout(passes: float, parameters_a_token: float) -> float:
    """Return the dropout rate: higher for more passes over the text and for more parameters per token."""
    if passes <= _FEW_PASSES:
        return 0.0
    return 0.2 if passes > _MANY_PASSES and parameters_a_token > _LARGE else 0.1
