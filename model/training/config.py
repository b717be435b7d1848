"""Complete configuration of a training run: read from TOML, immutable, unknown keys rejected."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model.config import ModelConfig
from model.config_enums import SCORED_POSITIONS, AttentionKind
from model.training.data.source_config import SourceConfig, check_texts, check_types

_T = TypeVar("_T")
_ADVICE = "give a recipe, such as model/training/configs/tales.toml; see docs/training.md"
MAX_NAME_CHARACTERS = 200  # it is a directory name, and the manifest has this limit
MAX_VOCAB_SIZE = 2**16  # the token ids of a corpus are held in memory as uint16
_OF_SOURCES = ("sources", "description", "sample_prompts")  # the last two describe the texts of the sources


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Configuration of a run. Two runs with equal configs and equal corpora have equal losses.

    sequence_length: tokens per sequence. batch_size: sequences per step.
    mask_documents: limit attention to the document. Documents are then packed side by side, and cut only if they are
        longer than sequence_length. If false, sequences are cut from a stream of documents, and attention spans all
        documents of a sequence.
    steps: optimizer steps. The learning rate rises linearly for warmup_steps, and falls linearly to zero in the last
        decay_steps.
    chat_steps: the last steps, which train on conversations (`SourceConfig.chat`). With chat_steps > 0 the tokenizer
        has ChatML's special tokens.
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
        integers = ("seed", "vocab_size", "sequence_length", "batch_size", "steps", "warmup_steps", "decay_steps")
        numbers = ("matrix_lr", "adam_lr", "weight_decay", "grad_clip", "checkpoint_minutes", "dropout")
        check_types(
            self, integers=(*integers, "evaluate_every", "chat_steps"), numbers=numbers, texts=("name", "description")
        )
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise ValueError(
                f"name must consist of letters, digits, '-', '_' and '.', and not start with '.': {self.name!r}"
            )
        if len(self.name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"name must have at most {MAX_NAME_CHARACTERS} characters")
        for name in ("matrix_lr", "adam_lr", "grad_clip", "checkpoint_minutes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.weight_decay < 0 or self.seed < 0:
            raise ValueError("weight_decay and seed must not be negative")
        object.__setattr__(self, "sample_prompts", check_texts("sample_prompts", self.sample_prompts))
        for name in ("vocab_size", "sequence_length", "batch_size", "steps", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE:,}, not {self.vocab_size:,}")
        if min(self.warmup_steps, self.decay_steps) < 0 or self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError("warmup_steps and decay_steps must not be negative and must fit into steps")
        if not 0 <= self.chat_steps < self.steps:
            raise ValueError("chat_steps must be at least 0 and less than steps")
        if not 0.0 <= self.dropout < 1.0 or not isinstance(self.mask_documents, bool):
            raise ValueError("dropout must be at least 0 and less than 1, mask_documents true or false")
        if self.mask_documents and (other := _beyond_masks(self.model)):
            raise ValueError(f"mask_documents does not support {other}: set mask_documents = false")
        if not any(source.repeats for source in self.sources):
            raise ValueError("no source is trained on: set repeats > 0 for at least one source")
        if self.chat_steps and not any(source.chat_repeats for source in self.sources):
            raise ValueError("chat_steps needs a chat source: set chat_repeats > 0 for at least one source")
        if self.sequence_length > self.model.max_context_length:
            raise ValueError("sequence_length must be at most the model's max_context_length")

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step."""
        return self.batch_size * self.sequence_length

    @property
    def chat_start(self) -> int:
        """First step of the chat phase; equal to `steps` without a chat phase."""
        return self.steps - self.chat_steps


def _beyond_masks(model: ModelConfig) -> str:
    """Return the attention option of a model that packed documents do not support, or "".

    Attention over packed documents computes only scaled products of queries and keys.
    """
    if model.attention is AttentionKind.AVERAGE:
        return f"attention = {str(model.attention)!r}"
    if model.sliding_window is not None:
        return "a sliding_window"
    return f"position = {str(model.position)!r}" if model.position in SCORED_POSITIONS else ""


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
        values["sample_prompts"] = check_texts("sample_prompts", values.get("sample_prompts", []))
        return _build(TrainConfig, {**values, "model": model, "sources": sources})
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
        _check_shape(values)
        for entry in values.get("sources", ()):
            entry["path"] = path.parent / entry["path"]
        extended = values.pop("extends", None)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {advice}") from error
    except KeyError as error:
        raise ValueError(f"{path}: a source is missing {error}") from error
    except ValueError as error:  # includes invalid TOML and invalid UTF-8
        raise ValueError(f"{path}: {error}") from error
    if extended is None:
        return values
    inherited = _read(path.parent / extended, (*extended_by, path.resolve()))
    if "sources" in values:
        inherited = {key: value for key, value in inherited.items() if key not in _OF_SOURCES}
    return inherited | values | {"model": inherited.get("model", {}) | values.get("model", {})}


def _check_shape(values: Mapping[str, Any]) -> None:
    """Reject values of a wrong type that merging with another recipe could not handle."""
    if not isinstance(values.get("extends", ""), str):
        raise ValueError("extends must be the path of a recipe")
    if not isinstance(values.get("model", {}), dict):
        raise ValueError("model must be a table")
    sources = values.get("sources", [])
    if not isinstance(sources, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("path", ""), str) for entry in sources
    ):
        raise ValueError("sources must be tables, each with a path")


def _build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if unknown := sorted(set(values) - {field.name for field in fields}):
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(needed - set(values)):
        raise ValueError(f"missing keys: {', '.join(missing)}")
    return kind(**values)
