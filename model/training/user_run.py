"""`kvasir train --corpus`: train on the user's text within a time limit, with a generated recipe.

The first attempt reads the text, trains a tokenizer, measures the machine, and writes a recipe and the cut text into
the run directory. Later attempts follow this recipe; only the number of steps still adapts to the time left.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from model.checkpoint.loading import check_writable
from model.checkpoint.manifest import CONFIG_FILE, MANIFEST_FILE
from model.checkpoint.shards import SHARD_PATTERNS
from model.evaluation.samples import Complete, complete_one_by_one
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.native import RANKS_FILE, SPEC_FILE, save_native
from model.training.config import TrainConfig, load_train_config
from model.training.data.bpe import train_bpe
from model.training.model_card import LOSS_CURVE_FILE
from model.training.progress import duration
from model.training.recipe import write_recipe
from model.training.run_length import Clock, Deadline
from model.training.run_plan import HELD_OUT_FILE, TRAIN_FILE, Task, make_plan, vocabulary_size
from model.training.state import StateError, locked, read_log
from model.training.train import RunSettings, train
from model.training.training_speed import seconds_a_step
from model.training.user_text import OwnText, hold_out, num_bytes, read_own_text, size_in_words

RECIPE_FILE = "recipe.toml"
_FACTS_FILE, _CLOCK_FILE = "own.json", "clock.json"
_CHECKPOINT_FILES = (CONFIG_FILE, RANKS_FILE, SPEC_FILE, f"{MANIFEST_FILE}.partial", LOSS_CURVE_FILE, "MODEL_CARD.md")
_SAMPLED_BYTES = 400_000  # sample that estimates the bytes per token
_SPARE = 1.5  # keep this factor more text than the plan needs, as the machine may turn out faster
_PROMPTS, _PROMPT_CHARACTERS = 2, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Request of the user. minutes: time limit for everything. began: start of the command, by `time.monotonic`."""

    name: str
    corpora: tuple[Path, ...]
    minutes: float
    seed: int
    began: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """Choices of the first attempt that the recipe does not hold."""

    minutes: float
    digests: dict[str, str]
    checkpoint: str
    compile: bool
    most_steps: int
    after_seconds: float
    finished: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise StateError(f"{path}: damaged; delete {path.parent} to start over") from error

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(path)


def train_own_text(
    wish: Wish,
    settings: RunSettings,
    report: Callable[[str], None],
    should_stop: Callable[[], bool],
    complete: Complete = complete_one_by_one,
) -> bool:
    """Plan and train, or resume. Returns whether the checkpoint is finished. Other arguments: see `train`.

    Raises:
        CorpusError: a file is not text, or there is too little text.
        PlanError: the time limit is too short.
        StateError: the text differs from that of the first attempt, or as in `train`.
        CheckpointError, OSError: as in `train`.
    """
    directory = settings.run_directory
    # The run and checkpoint directories may lie inside the text directory: skip their files.
    text = read_own_text(wish.corpora, apart=(directory, settings.checkpoint))
    _remove_half_written(directory, settings.checkpoint)
    check_writable(settings.checkpoint, may_replace=(directory / "state").exists())
    if not (directory / RECIPE_FILE).exists():
        (directory / _CLOCK_FILE).unlink(missing_ok=True)  # from an attempt that failed before its recipe was written
    clock = Clock(directory / _CLOCK_FILE, wish.began)
    with locked(directory):
        if (directory / RECIPE_FILE).exists():
            facts = _resume(wish, settings, text, clock, report)
        elif (directory / "state").exists():
            raise StateError(f"{directory}: holds a run with its own recipe; choose another --out or --run-directory")
        else:
            facts = _prepare(wish, settings, text, clock, report)
    if facts.finished:
        return True
    pace = Deadline(
        clock,
        seconds=60 * facts.minutes,
        after_seconds=facts.after_seconds,
        most_steps=facts.most_steps,
        losses=_held_out_losses(directory),
        changed=lambda config: write_recipe(directory / RECIPE_FILE, config, _comments(facts)),
    )
    config = load_train_config(directory / RECIPE_FILE)
    done = train(config, dataclasses.replace(settings, compile=facts.compile, pace=pace), report, should_stop, complete)
    clock.save()
    if done:
        dataclasses.replace(facts, finished=True).write(directory / _FACTS_FILE)
        report(f"\ndone in {duration(clock.spent)} of {duration(60 * facts.minutes)}{_early(pace)}")
    return done


def _held_out_losses(directory: Path) -> dict[int, float]:
    lines = read_log(directory / "log.jsonl")
    return {int(line["step"]) + 1: line["held_out_loss"] for line in lines if "held_out_loss" in line}


def _remove_half_written(directory: Path, checkpoint: Path) -> None:
    """Remove the files of an unfinished checkpoint, which has no manifest, after the run was killed."""
    if not (directory / _FACTS_FILE).exists() or (checkpoint / MANIFEST_FILE).exists():
        return
    if _Facts.read(directory / _FACTS_FILE).checkpoint == str(checkpoint.resolve()):
        for name in (*_CHECKPOINT_FILES, *SHARD_PATTERNS):
            for file in checkpoint.glob(name):
                file.unlink()


def _early(pace: Deadline) -> str:
    return (
        ": stopped early because the held-out loss rose; more steps would only overfit" if pace.learns_by_heart else ""
    )


def _resume(wish: Wish, settings: RunSettings, text: OwnText, clock: Clock, report: Callable[[str], None]) -> _Facts:
    """Return the facts of an existing run with the new time limit.

    Raises:
        StateError: the run began with a different text, or its facts are damaged.
    """
    directory = settings.run_directory
    facts = _Facts.read(directory / _FACTS_FILE)
    if sorted(facts.digests.values()) != sorted(text.digests.values()):
        changed = ", ".join(sorted(name for name, digest in text.digests.items() if facts.digests.get(name) != digest))
        raise StateError(
            f"{directory}: this run began with a different text than {changed or 'the given one'}; give "
            f"the first text, or start over: choose another --out, or delete {directory}"
        )
    if facts.finished and (settings.checkpoint / MANIFEST_FILE).is_file():
        report(f"{settings.checkpoint} is already finished; to start over, choose another --out, or delete {directory}")
        return facts
    report(f"resuming the run in {directory}, {duration(clock.spent)} of {duration(60 * wish.minutes)} used")
    taken = dataclasses.replace(facts, minutes=wish.minutes, finished=False)
    taken.write(directory / _FACTS_FILE)
    return taken


def _prepare(wish: Wish, settings: RunSettings, text: OwnText, clock: Clock, report: Callable[[str], None]) -> _Facts:
    """Train the tokenizer, measure the machine, plan the run, and write its files.

    The recipe is written last: its presence shows that the other files are complete.
    """
    directory = settings.run_directory
    kept, held_out = hold_out(text.documents)
    held = (
        f"{len(held_out)} of them are held out for evaluation"
        if held_out
        else "too similar to each other to hold any out"
    )
    report(f"text: {size_in_words(text.num_bytes)} of {text.form}; {held}")
    learned_from = _sampled(kept, int(1_000_000 + 400_000 * min(wish.minutes, 15.0)))
    tokenizer = train_bpe(learned_from, vocabulary_size(text.num_bytes))
    save_native(tokenizer, directory)
    clock.save()
    bytes_a_token = _bytes_a_token(tokenizer, kept)
    report(
        f"vocabulary: {tokenizer.vocab_size:,} tokens, chosen by the size of the text; "
        f"{bytes_a_token:.1f} bytes per token on average"
    )
    task = Task(
        name=wish.name,
        text=_names(text),
        seed=wish.seed,
        directory=directory,
        vocab_size=tokenizer.vocab_size,
        num_tokens=int(num_bytes(kept) / bytes_a_token),
        num_held_out_tokens=int(num_bytes(held_out) / bytes_a_token),
        may_compile=settings.compile,
        prompts=tuple(_prompt(document) for document in (held_out or kept)[:_PROMPTS]),
        description=f"It continues texts in the style of {_names(text)}, its only training text.",
    )

    def measure(config: TrainConfig) -> float:
        return seconds_a_step(
            config, device=settings.device, precision=settings.precision, attention=settings.attention
        )

    plan = make_plan(task, lambda: 60 * wish.minutes - clock.spent, measure)
    for reason in plan.reasons:
        report(reason)
    read = int(_SPARE * plan.config.steps * plan.config.tokens_per_step * bytes_a_token)
    _write_texts(directory / TRAIN_FILE, _sampled(kept, read))
    _write_texts(directory / HELD_OUT_FILE, held_out)
    facts = _Facts(
        minutes=wish.minutes,
        digests=text.digests,
        checkpoint=str(settings.checkpoint.resolve()),
        compile=plan.compile,
        most_steps=plan.most_steps,
        after_seconds=plan.after_seconds,
    )
    facts.write(directory / _FACTS_FILE)
    write_recipe(directory / RECIPE_FILE, plan.config, _comments(facts))
    return facts


def _comments(facts: _Facts) -> tuple[str, ...]:
    corpora = (f"  {name}: SHA-256 {digest}" for name, digest in facts.digests.items())
    return (f"Made by kvasir train --corpus, for {facts.minutes:g} minutes, from", *corpora)


def _names(text: OwnText) -> str:
    names = [Path(name).name for name in text.digests]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} files"


def _sampled(documents: Sequence[str], most_bytes: int) -> list[str]:
    """Return evenly spaced documents of about `most_bytes` bytes in total, or all documents."""
    share = min(1.0, most_bytes / num_bytes(documents))
    return [text for index, text in enumerate(documents) if int((index + 1) * share) > int(index * share)]


def _bytes_a_token(tokenizer: ByteLevelTokenizer, documents: Sequence[str]) -> float:
    """Estimate the bytes per token, counting the end-of-text token of each document."""
    sample = _sampled(documents, _SAMPLED_BYTES)
    return num_bytes(sample) / sum(len(tokenizer.encode(document)) + 1 for document in sample)


def _prompt(document: str) -> str:
    """Return the first words of a document, if possible without characters that a shell would interpret."""
    start = " ".join(document.split())[:_PROMPT_CHARACTERS]
    words = start.rsplit(" ", 1)[0] if " " in start else start[: _PROMPT_CHARACTERS // 2]
    plain = re.split(r"[\"'!`$\\]", words.lstrip("\"'“‘ "))[0].rstrip(" ,;:-")
    return plain if " " in plain else words


def _write_texts(path: Path, documents: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents))
