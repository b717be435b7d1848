"""A training run, completely described: read from TOML, frozen, unknown keys refused."""

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model.config import ModelConfig
from model.kinds import SCORED_POSITIONS, AttentionKind

_T = TypeVar("_T")
_ADVICE = "give a recipe, such as model/training/configs/tales.toml; docs/training.md says what stands in one"
MAX_NAME_CHARACTERS = 200  # it names a directory, and the manifest takes it
MAX_VOCAB_SIZE = 2**16  # the token ids of a corpus lie in memory, two bytes each
# Of integers what a generator takes as its seed, of numbers what is far beyond any use: the optimizers have float32.
_LARGEST: Mapping[object, int] = {int: 2**63 - 1, (int, float): 10**9}
_OF_SOURCES = ("sources", "description", "sample_prompts")  # the last two speak of the texts of the first


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One corpus: a .txt (documents parted by blank lines) or .jsonl file, either also .xz.

    path: the file; relative paths start at the config file's directory.
    repeats: how often each document occurs in an epoch of the mixture, which may be a fraction; 0 for never.
    held_out: share of the documents kept for validation, chosen by hash; 1 keeps all.
    held_out_ids: documents kept for validation by their "id", such as whole books.
    licence, attribution: for the model card.
    chat: how a document is told in the chat phase, a `ConversationKind`; "" for as it stands.
    chat_repeats: as `repeats`, for the chat phase.
    chat_draws: how many wordings of the conversation each document is told in.
    """

    name: str
    path: Path
    repeats: float
    held_out: float
    licence: str
    held_out_ids: tuple[str, ...] = ()
    attribution: str = ""
    chat: str = ""
    chat_repeats: float = 0.0
    chat_draws: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "held_out_ids", _texts("held_out_ids", self.held_out_ids))
        _check_types(
            self,
            integers=("chat_draws",),
            numbers=("repeats", "held_out", "chat_repeats"),
            texts=("name", "licence", "attribution", "chat"),
        )
        if not 1 <= self.chat_draws <= 1000:
            raise ValueError(f"source {self.name}: chat_draws must be 1 to 1,000")
        if not 0.0 <= self.held_out <= 1.0 or not all(0 <= n <= 10_000 for n in (self.repeats, self.chat_repeats)):
            raise ValueError(
                f"source {self.name}: repeats and chat_repeats must be 0 to 10,000, held_out between 0 and 1"
            )

    @property
    def is_trained_on(self) -> bool:
        """Whether any of its documents is learned from."""
        return self.repeats > 0 or self.chat_repeats > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything a run depends on; two runs with equal configs and equal corpora have equal losses.

    sequence_length, batch_size: tokens a window, windows a step.
    mask_documents: whether attention stays within a document. Then documents lie side by side, each cut only where it
        is longer than sequence_length; without it a window is cut from a stream of documents and sees all of it.
    steps: optimizer steps; warmup_steps rise linearly, the last decay_steps fall linearly to zero.
    chat_steps: of these steps, the last ones, which learn conversations (`SourceConfig.chat`); the tokenizer then has
        the marks of ChatML.
    dropout: share of what each half of a block adds that is left out while training; for texts seen many times.
    matrix_lr, adam_lr: peak learning rates of Muon (hidden matrices) and AdamW (all else).
    weight_decay: decoupled, on matrices and embeddings.
    checkpoint_minutes, evaluate_every: how often to save, and to measure the held-out loss.
    sample_prompts: completed at the end, for the model card.
    description: what the model is for, in a sentence or two, for the model card; it may be empty.
    """

    name: str
    seed: int
    vocab_size: int
    model: ModelConfig
    sources: tuple[SourceConfig, ...]
    sequence_length: int
    batch_size: int
    steps: int
    warmup_steps: int
    decay_steps: int
    matrix_lr: float
    adam_lr: float
    weight_decay: float
    grad_clip: float
    checkpoint_minutes: float
    evaluate_every: int
    sample_prompts: tuple[str, ...]
    description: str = ""
    mask_documents: bool = False
    chat_steps: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        integers = ("seed", "vocab_size", "sequence_length", "batch_size", "steps", "warmup_steps", "decay_steps")
        numbers = ("matrix_lr", "adam_lr", "weight_decay", "grad_clip", "checkpoint_minutes", "dropout")
        _check_types(
            self, integers=(*integers, "evaluate_every", "chat_steps"), numbers=numbers, texts=("name", "description")
        )
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise ValueError(f"name must be letters, digits, '-', '_' and '.', not {self.name!r}")
        if len(self.name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"name must have at most {MAX_NAME_CHARACTERS} characters")
        for name in ("matrix_lr", "adam_lr", "grad_clip", "checkpoint_minutes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.weight_decay < 0 or self.seed < 0:
            raise ValueError("weight_decay and seed must not be negative")
        object.__setattr__(self, "sample_prompts", _texts("sample_prompts", self.sample_prompts))
        for name in ("vocab_size", "sequence_length", "batch_size", "steps", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE:,}, not {self.vocab_size:,}")
        if min(self.warmup_steps, self.decay_steps) < 0 or self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError("warmup_steps and decay_steps must not be negative and must fit into steps")
        if not 0 <= self.chat_steps < self.steps:
            raise ValueError("chat_steps must not be negative, and less than steps: they are the last of them")
        if not 0.0 <= self.dropout < 1.0 or not isinstance(self.mask_documents, bool):
            raise ValueError("dropout must be at least 0 and less than 1, mask_documents true or false")
        if self.mask_documents and (other := _beyond_masks(self.model)):
            raise ValueError(f"mask_documents is not for {other}: set mask_documents = false")
        if not any(source.repeats for source in self.sources):
            raise ValueError("no source is trained on: give at least one repeats > 0")
        if self.chat_steps and not any(source.chat_repeats for source in self.sources):
            raise ValueError("chat_steps without a source to chat about: give at least one chat_repeats > 0")
        if self.sequence_length > self.model.max_context_length:
            raise ValueError("sequence_length is over the model's max_context_length")

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step."""
        return self.batch_size * self.sequence_length

    @property
    def chat_start(self) -> int:
        """The step at which the chat phase begins; `steps` where there is none."""
        return self.steps - self.chat_steps


def _beyond_masks(model: ModelConfig) -> str:
    """What of a model's attention is more than queries times keys, which is all that documents side by side can have.
    Empty where it is not."""
    if model.attention is AttentionKind.AVERAGE:
        return f"attention = {str(model.attention)!r}"
    if model.sliding_window is not None:
        return "a sliding_window"
    return f"position = {str(model.position)!r}" if model.position in SCORED_POSITIONS else ""


def load_train_config(path: Path) -> TrainConfig:
    """Read a TOML file. `extends = "other.toml"` begins with that recipe, and what stands in this one replaces it.

    Single values and the whole list of sources are replaced; of `[model]` only the keys that are given. What a recipe
    says of its texts, `description` and `sample_prompts`, goes with its sources.

    Raises:
        ValueError: a file cannot be read or extends itself, a key is unknown or missing, or a value is unusable.
    """
    values = _read(path, ())
    try:
        model = ModelConfig.from_dict({**values.pop("model"), "vocab_size": values["vocab_size"]})
        sources = tuple(_build(SourceConfig, entry) for entry in values.pop("sources"))
        values["sample_prompts"] = _texts("sample_prompts", values.get("sample_prompts", []))
        return _build(TrainConfig, {**values, "model": model, "sources": sources})
    except KeyError as error:
        raise ValueError(f"{path}: missing {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """A recipe's values over those of the recipe it extends; paths of sources start at the file they stand in."""
    if path.resolve() in extended_by:
        raise ValueError(f"{path}: this recipe extends itself")
    advice = f"{extended_by[-1]} extends it, by a path that starts at itself" if extended_by else _ADVICE
    try:
        values = tomllib.loads(path.read_text())
        _check_shape(values)
        for entry in values.get("sources", ()):
            entry["path"] = path.parent / entry["path"]
        extended = values.pop("extends", None)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {advice}") from error
    except KeyError as error:
        raise ValueError(f"{path}: a source is missing {error}") from error
    except ValueError as error:  # bad TOML and bad UTF-8 are such, too
        raise ValueError(f"{path}: {error}") from error
    if extended is None:
        return values
    inherited = _read(path.parent / extended, (*extended_by, path.resolve()))
    if "sources" in values:
        inherited = {key: value for key, value in inherited.items() if key not in _OF_SOURCES}
    return inherited | values | {"model": inherited.get("model", {}) | values.get("model", {})}


def _check_shape(values: Mapping[str, Any]) -> None:
    """Refuse what cannot be laid over another recipe."""
    if not isinstance(values.get("extends", ""), str):
        raise ValueError("extends must be the path of a recipe")
    if not isinstance(values.get("model", {}), dict):
        raise ValueError("model must be a table")
    sources = values.get("sources", [])
    if not isinstance(sources, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("path", ""), str) for entry in sources
    ):
        raise ValueError("sources must be tables, each with a path")


def _texts(name: str, value: object) -> tuple[str, ...]:
    """A list of texts, out of TOML, as a tuple."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be a list of texts")
    return tuple(value)


def _check_types(config: object, *, integers: Sequence[str], numbers: Sequence[str], texts: Sequence[str]) -> None:
    """Refuse values of a wrong type by name: TOML has types, and 2.5 steps are a slip of the pen."""
    for names, kinds, what in (
        (integers, int, "an integer"),
        (numbers, (int, float), "a number"),
        (texts, str, "a text"),
    ):
        for name in names:
            value = getattr(config, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"{name} must be {what}, not {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, not {value!r}")
            if isinstance(value, (int, float)) and abs(value) > (largest := _LARGEST[kinds]):
                raise ValueError(f"{name} must be at most {largest:,}")


def _build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if unknown := sorted(set(values) - {field.name for field in fields}):
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(needed - set(values)):
        raise ValueError(f"missing keys: {', '.join(missing)}")
    return kind(**values)
