"""A recipe for a text of one's own: how many words to learn, how large a model, how long, from text, time and speed.

The sizes follow Hoffmann et al. 2022 (arXiv 2203.15556): for a given amount of computation there is a best size, at
which a model sees a fixed number of tokens for each of its parameters. Where the text is too small for that, it is
repeated, with dropout, as often as that helps. docs/training.md has the measurements behind the constants.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.training.config import SourceConfig, TrainConfig
from model.training.pace import DECAY_SHARE

# What a model must see: fewer tokens for each of its parameters, or fewer passes over a small text, and a smaller model
# gets further in the same time.
TOKENS_PER_PARAMETER, ENOUGH_PASSES = 4, 12
PARAMETERS_PER_TOKEN = 16  # of the text; more, and it is learned by heart at once
MOST_PASSES = 24  # over the text; beyond, there is nothing left in it
FEWEST_STEPS = 40
TRAIN_FILE, HELD_OUT_FILE = "text.jsonl", "held-out.jsonl"
CHECKPOINT_MINUTES = 0.4  # the most that is lost of a run that is killed
_MEASUREMENTS = 12  # of the held-out loss, during a run
_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY = 512, 8192
_FEW_PASSES, _MANY_PASSES, _LARGE = 8, 16, 8  # when dropout begins; when it is more, for so many parameters a token
_HEAD_SIZE = 32
# Compiling takes half a minute and saves a fifth of each step.
_COMPILE_SECONDS, _SPEEDUP, _COMPILE_FROM_SECONDS = 30.0, 1.25, 480.0
# What comes after the last step: the files and the picture of the loss; samples, drawn without a cache.
_FINISHING_SECONDS, _SAMPLE_TOKENS, _SECONDS_A_LAYER = 4.0, 200, 0.001
_LICENCE = "as its owner says"
_RATE, _RATE_WIDTH = 1e-2, 256  # wider models take it in proportion


class PlanError(ValueError):
    """There is no time to train anything. The message says how much would do."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model's width and depth, and what it is fed with: tokens a window, windows a step."""

    width: int
    layers: int
    sequence_length: int
    batch_size: int

    def model(self, vocab_size: int) -> ModelConfig:
        """The model of this size: of the same kind as the one that ships."""
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
    """What is to be planned for.

    name: of the model. text: what its text is called. directory: where that lies, and the held-out one.
    num_tokens, num_held_out_tokens: of each; the second may be 0.
    may_compile: whether there is a compiler.
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
    """A recipe, and in words why it is this one.

    most_steps: what the text bears. after_seconds: what finishing takes, as estimated.
    """

    config: TrainConfig
    compile: bool
    most_steps: int
    after_seconds: float
    reasons: tuple[str, ...]


def vocabulary_size(num_bytes: int) -> int:
    """A power of two that grows with the root of the text: 512 for 50 KB, 8,192 for 12 MB and more."""
    power = round(math.log2(2.3 * math.sqrt(num_bytes)))
    return min(max(1 << power, _SMALLEST_VOCABULARY), _LARGEST_VOCABULARY)


def make_plan(task: Task, seconds_left: Callable[[], float], seconds_a_step: Callable[[TrainConfig], float]) -> Plan:
    """Go up the ladder of sizes, measuring each, as long as time and text suffice for the next.

    A size is too large when in the time it could see neither as many tokens as its parameters ask for, nor the text as
    often as is worth most.

    Args:
        seconds_left: for everything, from now on.
        seconds_a_step: measures it, not compiled.

    Raises:
        PlanError: the time does not suffice for the smallest.
    """
    chosen, why = _speed(task, LADDER[0], seconds_a_step), "the largest there is a size for"
    for size in LADDER[1:]:
        parameters = size.model(task.vocab_size).num_parameters
        if parameters > PARAMETERS_PER_TOKEN * task.num_tokens:
            why = "which is as much as so small a text can teach"
            break
        speed = _speed(task, size, seconds_a_step)
        tokens = speed.steps(seconds_left()) * size.sequence_length * size.batch_size
        if tokens < min(TOKENS_PER_PARAMETER * parameters, ENOUGH_PASSES * task.num_tokens):
            why = "the largest that sees enough text in the time"
            break
        chosen = speed
    left = seconds_left()
    if (possible := chosen.steps(left)) < FEWEST_STEPS:
        needed = FEWEST_STEPS * chosen.seconds + chosen.after - left
        raise PlanError(f"too few --minutes: {needed:.0f} s more are needed here for even the smallest model")
    return _plan(task, chosen, possible, why)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Of a size on this machine: seconds a step, to finish (measuring, samples), and for the compiler, if it may be."""

    size: Size
    seconds: float
    after: float
    may_compile: bool

    def compiles(self, left: float) -> bool:
        """Whether that is worth the wait."""
        return self.may_compile and left >= _COMPILE_FROM_SECONDS

    def steps(self, left: float) -> int:
        """How many fit."""
        left -= self.after
        if self.compiles(left + self.after):
            return int((left - _COMPILE_SECONDS) * _SPEEDUP / self.seconds)
        return int(left / self.seconds)


def _speed(task: Task, size: Size, seconds_a_step: Callable[[TrainConfig], float]) -> _Speed:
    seconds = seconds_a_step(_config(task, size, steps=1))
    forward = seconds / (size.sequence_length * size.batch_size) / 3  # of a token; backward costs twice as much
    a_sample = _SAMPLE_TOKENS * (_SAMPLE_TOKENS / 2 * forward + _SECONDS_A_LAYER * size.layers)
    after = _FINISHING_SECONDS + task.num_held_out_tokens * forward + len(task.prompts) * a_sample
    return _Speed(size, seconds, after, task.may_compile)


def _plan(task: Task, speed: _Speed, possible: int, why: str) -> Plan:
    tokens_per_step = speed.size.sequence_length * speed.size.batch_size
    most = max(FEWEST_STEPS, MOST_PASSES * task.num_tokens // tokens_per_step)
    config = _config(task, speed.size, steps=min(possible, most))
    model = config.model
    passes = config.steps * tokens_per_step / task.num_tokens
    through = f"{passes:.0f} times through the text" if passes >= 1.5 else f"{passes:.0%} of the text"
    dropout = f", with dropout {config.dropout} because it is read so often" if config.dropout else ""
    reasons = [
        f"model: {model.num_parameters / 1e6:.2g} million parameters, {model.num_layers} layers of width "
        f"{model.hidden_size}, {why}",
        f"training: {config.steps:,} steps of {tokens_per_step:,} tokens, {through}{dropout}",
    ]
    if possible > most:
        reasons.append(
            f"that takes less than the time there is: read over {MOST_PASSES} times, a text is only learned by heart"
        )
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
    """The more often a text is read, and the more room a model has to remember it, the more is left out."""
    if passes <= _FEW_PASSES:
        return 0.0
    return 0.2 if passes > _MANY_PASSES and parameters_a_token > _LARGE else 0.1
