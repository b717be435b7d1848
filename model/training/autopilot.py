"""`kvasir train --corpus`: train on the user's text within a time limit, with a model chosen from a table of sizes.

Each compute budget has an optimal model size, with a fixed number of training tokens per parameter (Hoffmann et al.
2022, arXiv 2203.15556). A text with fewer tokens is repeated, with dropout. docs/training.md has the measurements.
"""

import dataclasses
import json
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.manifest import MANIFEST_FILE
from model.evaluation.prompts import Complete, complete_one_by_one
from model.nn.transformer import Transformer
from model.tokenizer.byte_level import save_native
from model.training.config import SourceConfig, TrainConfig, load_train_config, write_recipe
from model.training.data.bpe import train_bpe
from model.training.optimizer import Optimizers
from model.training.state import LOG_FILE, STATE_FILE, duration, locked, read_log
from model.training.train import RunSettings, check_output, train
from model.training.user_text import OwnText, hold_out, num_bytes, read_own_text, size_in_words

RECIPE_FILE = "recipe.toml"
_SMALLEST_RECIPE = Path(__file__).with_name("configs") / "tales.toml"
_PLAN_FILE, _TEXT_FILE, _HELD_OUT_ID = "plan.json", "text.jsonl", "held-out"
# Minimum tokens per parameter, or passes over a small text. With less of both, a smaller model reaches a lower loss.
TOKENS_PER_PARAMETER, ENOUGH_PASSES = 4, 12
PARAMETERS_PER_TOKEN = 16  # upper limit; a larger model overfits the text at once
MOST_PASSES = 24  # over the text; further passes only overfit
FEWEST_STEPS = 40
DECAY_SHARE = 0.2  # of the steps
_TOLERANCE = 0.03  # of the steps: a smaller change does not update the config
_WORSE_MEASUREMENTS = 2  # consecutive held-out losses above the best: the model overfits
# Dropout starts above the first number of passes. It doubles above the second, for over _LARGE parameters per token.
_FEW_PASSES, _MANY_PASSES, _LARGE = 8, 16, 8
_COMPILE_FROM_SECONDS = 480.0  # compiling takes about 30 s and makes steps 1.25 times as fast
_FINISHING_SECONDS = 5.0  # checkpoint files, loss curve and samples, without the evaluation
_SAMPLED_BYTES = 400_000  # sample that estimates the bytes per token
_SPARE = 1.5  # keep this factor more text than the plan needs, as the machine may turn out faster
_PROMPTS, _PROMPT_CHARACTERS = 2, 40


# Width, layers, tokens per sequence and sequences per batch of the models.
SIZES = (
    (64, 2, 256, 8),
    (96, 3, 256, 8),
    (128, 4, 256, 8),
    (192, 4, 256, 8),
    (256, 6, 512, 8),
    (384, 8, 512, 16),
    (512, 10, 1024, 16),
    (768, 12, 1024, 32),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTextRequest:
    """Arguments of `kvasir train --corpus`.

    corpora: text files and directories. minutes: time limit of the command. began: start of the command, as
        `time.monotonic`.
    """

    name: str
    corpora: tuple[Path, ...]
    minutes: float
    seed: int
    began: float


class Plan(NamedTuple):
    """Recipe of a training run, planned for one text and one time limit.

    most_steps: maximum number of steps, since more passes over the text would overfit it.
    """

    config: TrainConfig
    most_steps: int
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlanFile:
    """Content of plan.json: the parts of the plan of a run that its recipe does not hold.

    digests: SHA-256 of each text file, by path. most_steps: see `Plan`. after_seconds: time reserved after the last
    step. planning_seconds: time from the start of the first command to the end of planning.
    """

    digests: dict[str, str]
    compile: bool
    most_steps: int
    after_seconds: float
    planning_seconds: float


@dataclass(kw_only=True, slots=True)
class Deadline:
    """Time limit of a training run: changes the number of steps while the learning rate is on its plateau.

    The decay begins when it needs all of the remaining time, or when the model overfits.

    at: time at which the command must end, as `time.monotonic`. after_seconds, most_steps: see `_PlanFile`.
    changed: called with each new config. is_overfitting: the last two held-out losses are above the lowest before.
    """

    at: float
    after_seconds: float
    most_steps: int
    changed: Callable[[TrainConfig], None]
    is_overfitting: bool = False

    def next_config(
        self, step: int, config: TrainConfig, seconds: float | None, held_out: Sequence[float]
    ) -> TrainConfig:
        """Return the config for the next step: with more or fewer steps if the speed or overfitting requires it.

        Arguments: see `RunSettings.next_config`. seconds: recent seconds per step.
        """
        if seconds is None or step > config.steps - config.decay_steps or step < config.warmup_steps:
            return config
        before, recent = held_out[:-_WORSE_MEASUREMENTS], held_out[-_WORSE_MEASUREMENTS:]
        self.is_overfitting = bool(before) and min(recent) > min(before)
        possible = int((self.at - self.after_seconds - time.monotonic()) / seconds)
        steps = max(step + 1, min(step + possible, self.most_steps))
        steps_if_decaying_now = int(step / (1 - DECAY_SHARE)) + 1
        if self.is_overfitting:
            steps = min(steps, steps_if_decaying_now)
        if steps > steps_if_decaying_now and abs(steps - config.steps) <= _TOLERANCE * config.steps:
            return config
        decay = steps - step if steps <= steps_if_decaying_now else int(DECAY_SHARE * steps)
        config = dataclasses.replace(config, steps=steps, decay_steps=decay)
        self.changed(config)
        return config


def train_own_text(
    request: OwnTextRequest,
    settings: RunSettings,
    report: Callable[[str], None],
    should_stop: Callable[[], bool],
    complete: Complete = complete_one_by_one,
) -> bool:
    """Plan a training run on the user's text and run it, or resume the run. Return True if the checkpoint is finished.

    The first command writes the recipe, the tokenizer and the text into the run directory. A later command with the
    same run directory resumes the run by this recipe.

    Raises:
        CheckpointError: see `train`.
        ValueError: the text or the time limit is too short, the text is not that of the first command, or see `train`.
    """
    directory, recipe = settings.run_directory, settings.run_directory / RECIPE_FILE
    # Skip the files of the run and checkpoint directories, which may lie inside the text directory.
    text = read_own_text(request.corpora, apart=(directory, settings.checkpoint))
    spent = 0.0
    with locked(directory):
        check_output(settings)
        if recipe.exists():
            plan = _read_plan(directory, text)
            if (settings.checkpoint / MANIFEST_FILE).is_file():
                start_over = f"to start over, choose another --run-directory, or delete {directory}"
                report(f"{settings.checkpoint} is already finished; {start_over}")
                return True
            spent = plan.planning_seconds + sum(line["seconds"] for line in read_log(directory / LOG_FILE)[-1:])
            report(f"resuming the run in {directory}, {duration(spent)} of {duration(60 * request.minutes)} used")
        elif (directory / STATE_FILE).exists():
            raise ValueError(
                f"{directory}: holds a run begun with --config, not --corpus; choose another --run-directory"
            )
        else:
            plan = _prepare(request, settings, text, report)
    deadline = Deadline(
        at=request.began + 60 * request.minutes - spent,
        after_seconds=plan.after_seconds,
        most_steps=plan.most_steps,
        changed=lambda config: write_recipe(recipe, config),
    )
    settings = dataclasses.replace(settings, compile=plan.compile, next_config=deadline.next_config)
    done = train(load_train_config(recipe), settings, report, should_stop, complete)
    if done:
        early = ": stopped early because the held-out loss rose; more steps would only overfit"
        spent += time.monotonic() - request.began
        report(f"\ndone in {duration(spent)} of {duration(60 * request.minutes)}{early * deadline.is_overfitting}")
    return done


def _read_plan(directory: Path, text: OwnText) -> _PlanFile:
    """Read plan.json of a training run. Raises ValueError if it is missing, damaged, or for a different text."""
    path = directory / _PLAN_FILE
    try:
        plan = _PlanFile(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: plan missing or damaged; delete {directory} to start over") from error
    if sorted(plan.digests.values()) != sorted(text.digests.values()):
        changed = ", ".join(sorted(name for name, digest in text.digests.items() if plan.digests.get(name) != digest))
        raise ValueError(
            f"{directory}: this run began with a different text than {changed or 'the given one'}; give the first "
            f"text to --corpus, or start over: choose another --run-directory, or delete {directory}"
        )
    return plan


def _prepare(request: OwnTextRequest, settings: RunSettings, text: OwnText, report: Callable[[str], None]) -> _PlanFile:
    """Train the tokenizer, plan the run, and write the run directory: the recipe last, as it marks a complete plan."""
    directory, size_of_text = settings.run_directory, num_bytes(text.documents)
    train_texts, held_out = hold_out(text.documents)
    held = f"{len(held_out)} of them are held out for evaluation" if held_out else "too similar, so none is held out"
    report(f"text: {size_in_words(size_of_text)} of {text.form}; {held}")
    learned_from = _sampled(train_texts, int(1_000_000 + 400_000 * min(request.minutes, 15.0)))
    tokenizer = train_bpe(learned_from, vocabulary_size(size_of_text))
    save_native(tokenizer, directory)
    sample = _sampled(train_texts, _SAMPLED_BYTES)
    bytes_per_token = num_bytes(sample) / sum(len(tokenizer.encode(document)) + 1 for document in sample)
    num_tokens = int(num_bytes(train_texts) / bytes_per_token)
    report(
        f"vocabulary: {tokenizer.vocab_size:,} tokens, chosen by the size of the text; "
        f"{bytes_per_token:.1f} bytes per token on average"
    )
    names = [Path(path).name for path in text.digests]
    source = SourceConfig(
        name=", ".join(names) if len(names) < 4 else f"{len(names)} files",
        path=directory / _TEXT_FILE,
        repeats=1,
        held_out=0.0,
        held_out_ids=(_HELD_OUT_ID,) if held_out else (),
        licence="as its owner says",
    )
    base = base_config(
        tokenizer.vocab_size,
        name=request.name,
        description=f"It continues texts in the style of {source.name}, its only training text.",
        seed=request.seed,
        sources=(source,),
        sample_prompts=tuple(
            textwrap.shorten(document[:200], _PROMPT_CHARACTERS, placeholder="") or document[:20]
            for document in (held_out or train_texts)[:_PROMPTS]
        ),
    )
    plan = make_plan(
        base,
        num_tokens,
        lambda: request.began + 60 * request.minutes - time.monotonic() - _FINISHING_SECONDS,
        lambda config: _seconds_per_step(config, settings),
    )
    config = plan.config
    _report_plan(plan, num_tokens, report)
    most_bytes = int(_SPARE * config.steps * config.tokens_per_step * bytes_per_token)
    records = [{"text": text} for text in _sampled(train_texts, most_bytes)]
    records += [{"id": _HELD_OUT_ID, "text": text} for text in held_out]
    source.path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    evaluation_steps = num_bytes(held_out) / bytes_per_token / config.tokens_per_step
    plan_file = _PlanFile(
        digests=text.digests,
        compile=settings.compile and config.steps * plan.seconds_per_step >= _COMPILE_FROM_SECONDS,
        most_steps=plan.most_steps,
        after_seconds=_FINISHING_SECONDS + evaluation_steps * plan.seconds_per_step,
        planning_seconds=time.monotonic() - request.began,
    )
    (directory / _PLAN_FILE).write_text(json.dumps(dataclasses.asdict(plan_file)))
    write_recipe(directory / RECIPE_FILE, config)
    return plan_file


def vocabulary_size(num_bytes: int) -> int:
    """Return the vocabulary size for a text: the power of two nearest to 2.3 * sqrt(num_bytes), from 512 to 8192."""
    return int(min(max(1 << round(math.log2(2.3 * math.sqrt(num_bytes))), 512), 8192))


def base_config(vocab_size: int, **values: Any) -> TrainConfig:
    """Return the recipe tales.toml, whose architecture all `SIZES` share, with this vocabulary size and `values`."""
    recipe = load_train_config(_SMALLEST_RECIPE)
    model = dataclasses.replace(recipe.model, vocab_size=vocab_size)
    return dataclasses.replace(recipe, vocab_size=vocab_size, model=model, checkpoint_minutes=0.4, **values)


def _sized(base: TrainConfig, width: int, layers: int, sequence_length: int, batch_size: int) -> TrainConfig:
    """Return the recipe `base` with the model sizes, sequence length and batch size of one entry of `SIZES`."""
    heads = width // 32
    model = dataclasses.replace(
        base.model,
        max_context_length=sequence_length,
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=32,
        mlp_size=-(-8 * width // 3 // 32) * 32,
    )
    return dataclasses.replace(base, model=model, sequence_length=sequence_length, batch_size=batch_size)


def make_plan(
    base: TrainConfig,
    num_tokens: int,
    seconds_left: Callable[[], float],
    seconds_per_step: Callable[[TrainConfig], float],
) -> Plan:
    """Measure the speed of models of increasing size, and plan a run of the largest that fits the time and the text.

    A model does not fit the time if it would see fewer than TOKENS_PER_PARAMETER tokens per parameter, and would also
    make fewer than ENOUGH_PASSES passes over the text of `num_tokens` tokens. A model does not fit the text if it has
    over PARAMETERS_PER_TOKEN parameters per token of the text.

    seconds_left: returns the time left for training steps. seconds_per_step: measures the time of a step.

    Raises:
        ValueError: the time left is too short for FEWEST_STEPS steps.
    """
    config, *larger_configs = (_sized(base, *size) for size in SIZES)
    seconds = seconds_per_step(config)
    for larger in larger_configs:
        parameters = larger.model.num_parameters
        if parameters > PARAMETERS_PER_TOKEN * num_tokens:
            break
        timed = seconds_per_step(larger)
        tokens = int(seconds_left() / timed) * larger.tokens_per_step
        if tokens < min(TOKENS_PER_PARAMETER * parameters, ENOUGH_PASSES * num_tokens):
            break
        config, seconds = larger, timed
    left = seconds_left()
    if left < FEWEST_STEPS * seconds:
        needed = FEWEST_STEPS * seconds - left
        raise ValueError(
            f"too few --minutes: {FEWEST_STEPS} training steps, the fewest of a run, need {needed:.0f} s more on this "
            f"machine; raise --minutes"
        )
    most = max(FEWEST_STEPS, MOST_PASSES * num_tokens // config.tokens_per_step)
    steps = min(int(left / seconds), most)
    passes = steps * config.tokens_per_step / num_tokens
    is_large = config.model.num_parameters > _LARGE * num_tokens
    rate = 1e-2 * min(1.0, 256 / config.model.hidden_size)
    config = dataclasses.replace(
        config,
        steps=steps,
        warmup_steps=min(steps // 4, 10 + steps // 30),
        decay_steps=int(DECAY_SHARE * steps),
        dropout=0.0 if passes <= _FEW_PASSES else 0.2 if passes > _MANY_PASSES and is_large else 0.1,
        matrix_lr=rate,
        adam_lr=0.6 * rate,
        evaluate_every=max(1, steps // 12),
    )
    return Plan(config, most, seconds)


def _report_plan(plan: Plan, num_tokens: int, report: Callable[[str], None]) -> None:
    config, model, tokens = plan.config, plan.config.model, plan.config.tokens_per_step
    extent = f"{config.steps * tokens / num_tokens:.1f} passes over the text"
    dropout = f", with dropout {config.dropout} against overfitting" if config.dropout else ""
    report(
        f"model: {model.num_parameters / 1e6:.2g} million parameters, {model.num_layers} layers of width "
        f"{model.hidden_size}, the largest that fits the text and the time limit"
    )
    report(f"training: {config.steps:,} steps of {tokens:,} tokens, {extent}{dropout}")
    if config.steps == plan.most_steps:
        report(f"the run ends before the time limit: over {MOST_PASSES} passes would only overfit the text")


def _seconds_per_step(config: TrainConfig, settings: RunSettings) -> float:
    """Return the median seconds per step of three training steps on random tokens, after a warm-up, not compiled."""
    device, model = settings.device, Transformer(config.model, ATTENTION_BACKENDS[settings.attention])
    model.initialize(0)
    model.to(device)
    dtype = getattr(torch, settings.precision)
    optimizer = Optimizers(model, matrix_lr=1e-3, adam_lr=1e-3, weight_decay=0.0, dtype=dtype)
    rows = AttentionMetadata.uncached((config.sequence_length,) * config.batch_size, device)
    tokens = torch.randint(config.vocab_size, (config.tokens_per_step + 1,)).to(device)
    durations: list[float] = []
    for _ in range(4):
        began = time.monotonic()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=settings.precision == "bfloat16"):
            loss = functional.cross_entropy(model(tokens[:-1], rows, None), tokens[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(1.0)
        float(loss.detach())  # waits for the device
        durations.append(time.monotonic() - began)
    return statistics.median(durations[1:])


def _sampled(documents: Sequence[str], most_bytes: int) -> list[str]:
    """Return every n-th document, about `most_bytes` bytes in total, or all documents if their total is smaller."""
    share = min(1.0, most_bytes / num_bytes(documents))
    return [text for index, text in enumerate(documents) if int((index + 1) * share) > int(index * share)]
