"""Configuration of a training run: read from a TOML recipe, written as one, immutable, unknown keys rejected."""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model.config import ModelConfig
from model.config_enums import SCORED_POSITIONS, AttentionKind

_T = TypeVar("_T")
_ADVICE = "give a recipe, such as model/training/configs/tales.toml; see docs/training.md"
MAX_NAME_CHARACTERS = 200  # the name is a directory name, and the manifest has this limit
MAX_VOCAB_SIZE = 2**16  # the token ids of a corpus are held in memory as uint16
_OF_SOURCES = ("sources", "description", "sample_prompts")  # the last two describe the texts of the sources
_POSITIVE = (
    *("matrix_lr", "adam_lr", "grad_clip", "checkpoint_minutes"),
    *("vocab_size", "sequence_length", "batch_size", "steps", "evaluate_every"),
)
# Types of TOML values: accepted Python types, name in errors, largest value. Integers: the largest seed of a generator.
# Other numbers: far above any useful value, and safe in float32.
_KINDS: Mapping[object, tuple[tuple[type, ...], str, int]] = {
    bool: ((bool,), "true or false", 1),
    int: ((int,), "an integer", 2**63 - 1),
    float: ((int, float), "a number", 10**9),
    str: ((str,), "a string", 0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One corpus: a .txt file (documents separated by blank lines) or .jsonl file, optionally .xz.

    path: the file; relative paths start at the directory of the recipe.
    repeats: number of times each document occurs in an epoch of the mixture, possibly a fraction; 0 for never.
    held_out: share of the documents kept for validation, chosen by hash; 1 keeps all.
    held_out_ids: documents kept for validation by their "id", such as whole books.
    licence, attribution: for the model card.
    chat_repeats: as `repeats`, for the chat phase. Documents with "turns" are conversations there, others plain text.
    """

    name: str
    path: Path
    repeats: float
    held_out: float
    licence: str
    held_out_ids: tuple[str, ...] = ()
    attribution: str = ""
    chat_repeats: float = 0.0

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0.0 <= self.held_out <= 1.0 or not all(0 <= n <= 10_000 for n in (self.repeats, self.chat_repeats)):
            raise ValueError(
                f"source {self.name}: repeats and chat_repeats must be 0 to 10,000, held_out between 0 and 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Configuration of a run. Two runs with equal configs and equal corpora have equal losses.

    sequence_length: tokens per sequence. batch_size: sequences per step.
    mask_documents: limit attention to the document. Documents are then packed side by side, and cut only if they are
        longer than sequence_length. If false, sequences are cut from a stream of documents, and attention spans all
        documents of a sequence.
    steps: optimizer steps. The learning rate rises linearly for warmup_steps, and falls linearly to zero in the last
        decay_steps.
    chat_steps: the last steps, which train on the sources' `chat_repeats`. With chat_steps > 0 the tokenizer has
        ChatML's special tokens.
    dropout: dropout rate on the output of attention and MLP; useful for texts that are repeated often.
    matrix_lr, adam_lr: peak learning rates of Muon (hidden matrices) and AdamW (all other parameters).
    weight_decay: decoupled, on matrices and embeddings.
    checkpoint_minutes: minutes between saves. evaluate_every: steps between held-out evaluations.
    sample_prompts: prompts completed at the end of the run, for the model card.
    description: one or two sentences on the purpose of the model, for the model card; may be empty.
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
        _check_types(self)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        has_only_plain_attention = (
            self.model.attention is not AttentionKind.AVERAGE
            and self.model.sliding_window is None
            and self.model.position not in SCORED_POSITIONS
        )
        requirements = {
            f"name must consist of letters, digits, '-', '_' and '.', not start with '.', and have at most "
            f"{MAX_NAME_CHARACTERS} characters: {self.name!r}": (
                re.fullmatch(r"[\w-][\w.-]*", self.name) and len(self.name) <= MAX_NAME_CHARACTERS
            ),
            "weight_decay and seed must not be negative": self.weight_decay >= 0 and self.seed >= 0,
            f"vocab_size must be at most {MAX_VOCAB_SIZE:,}, not {self.vocab_size:,}": self.vocab_size
            <= MAX_VOCAB_SIZE,
            "warmup_steps and decay_steps must not be negative and must fit into steps": (
                min(self.warmup_steps, self.decay_steps) >= 0 and self.warmup_steps + self.decay_steps <= self.steps
            ),
            "chat_steps must be at least 0 and less than steps": 0 <= self.chat_steps < self.steps,
            "dropout must be at least 0 and less than 1": 0.0 <= self.dropout < 1.0,
            "mask_documents does not support a sliding_window, attention = 'average' or positions that change "
            "attention scores: set mask_documents = false": has_only_plain_attention or not self.mask_documents,
            "no source is trained on: set repeats > 0 for at least one source": any(s.repeats for s in self.sources),
            "chat_steps needs a chat source: set chat_repeats > 0 for at least one source": (
                not self.chat_steps or any(source.chat_repeats for source in self.sources)
            ),
            "sequence_length must be at most the model's max_context_length": (
                self.sequence_length <= self.model.max_context_length
            ),
        }
        for requirement, is_met in requirements.items():
            if not is_met:
                raise ValueError(requirement)

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step."""
        return self.batch_size * self.sequence_length

    @property
    def chat_start(self) -> int:
        """First step of the chat phase; equal to `steps` without a chat phase."""
        return self.steps - self.chat_steps


def _check_types(config: SourceConfig | TrainConfig) -> None:
    """Reject TOML values of a wrong type or size, and make lists of strings tuples."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type == tuple[str, ...]:
            if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) and text for text in value):
                raise ValueError(f"{field.name} must be a list of non-empty strings")
            object.__setattr__(config, field.name, tuple(value))
        if field.type not in _KINDS:
            continue
        types, what, largest = _KINDS[field.type]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{field.name} must be {what}, not {value!r}")
        if isinstance(value, (int, float)) and not abs(value) <= largest:  # also true for NaN
            raise ValueError(f"{field.name} must be finite and at most {largest:,}")


def load_train_config(path: Path) -> TrainConfig:
    """Read a TOML recipe. With `extends = "other.toml"`, its keys override those of the other recipe.

    Values and the whole list of sources are replaced. The keys of `[model]` are merged. A recipe with its own sources
    does not inherit `description` and `sample_prompts`, which describe the sources.

    Raises:
        ValueError: a file cannot be read or extends itself, a key is unknown or missing, or a value is unusable.
    """
    values = _read(path, ())
    try:
        model = ModelConfig.from_dict({**values.pop("model"), "vocab_size": values["vocab_size"]})
        sources = tuple(_build(SourceConfig, entry) for entry in values.pop("sources"))
        return _build(TrainConfig, {"sample_prompts": (), **values, "model": model, "sources": sources})
    except KeyError as error:
        raise ValueError(f"{path}: missing {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a recipe merged over those it extends. Source paths are relative to the file they are in."""
    if path.resolve() in extended_by:
        raise ValueError(f"{path}: this recipe extends itself")
    advice = f"{extended_by[-1]} extends it, by a path relative to its own directory" if extended_by else _ADVICE
    try:
        values = tomllib.loads(path.read_text())
        extended = path.parent / values.pop("extends") if "extends" in values else None
        values = {**values, "model": {**values["model"]}} if "model" in values else values
        for entry in values.get("sources", ()):
            entry["path"] = path.parent / entry["path"]
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path}: extends must be a path, model a table, sources tables with a path each") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {advice}") from error
    except ValueError as error:  # includes invalid TOML and invalid UTF-8
        raise ValueError(f"{path}: {error}") from error
    if extended is None:
        return values
    inherited = _read(extended, (*extended_by, path.resolve()))
    if "sources" in values:
        inherited = {key: value for key, value in inherited.items() if key not in _OF_SOURCES}
    return inherited | values | {"model": inherited.get("model", {}) | values.get("model", {})}


def _build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if unknown := sorted(set(values) - {field.name for field in fields}):
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    if missing := sorted({field.name for field in fields if field.default is dataclasses.MISSING} - set(values)):
        raise ValueError(f"missing keys: {', '.join(missing)}")
    return kind(**values)


def write_recipe(path: Path, config: TrainConfig) -> None:
    """Write a recipe atomically. Paths of sources inside its directory are written relative to the directory."""
    directory = path.parent.resolve()
    run = {key: value for key, value in chosen_values(config).items() if key not in ("model", "sources")}
    model = {key: config.model.to_dict()[key] for key in chosen_values(config.model) if key != "vocab_size"}
    lines = [*_table(run), "\n[model]", *_table(model)]
    for source in config.sources:
        file = source.path.resolve()
        place = str(file.relative_to(directory) if directory in file.parents else file)
        lines += ["\n[[sources]]", *_table(chosen_values(source) | {"path": place})]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n")
    with partial.open("rb") as file_to_sync:
        os.fsync(file_to_sync.fileno())
    partial.replace(path)


def chosen_values(config: TrainConfig | SourceConfig | ModelConfig) -> dict[str, Any]:
    """Return the values that differ from their defaults, by field name."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _table(values: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key} = {_toml(value)}" for key, value in values.items() if value is not None)


def _toml(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_table(value))} }}"
    # JSON strings are valid TOML basic strings, except that JSON does not escape DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
