"""Configuration of a training run, and its TOML file, called a recipe."""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from model.config import ModelConfig
from model.config_enums import SCORED_POSITIONS, AttentionKind, check_keys

_ADVICE = "give a recipe, such as model/training/configs/tales.toml; see docs/training.md"
MAX_NAME_CHARACTERS = 200  # the name is a directory name, and the manifest has this limit
_REPEATS = ("repeats", "chat_repeats")  # values of sources that a recipe may also set in a table
_OF_SOURCES = ("sources", "description", "sample_prompts")  # the last two describe the texts of the sources
# Upper limits: the largest seed of a generator, and for real numbers a value far above any use, safe in float32.
_Size = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[float, Meta(gt=0, le=1e9)]
_Repeats = Annotated[float, Meta(ge=0, le=10_000)]
_Texts = tuple[Annotated[str, Meta(min_length=1)], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Source of a recipe: one .txt file (documents separated by blank lines) or .jsonl file, optionally with .xz.

    repeats: occurrences of each document in an epoch of the pretraining phase, possibly a fraction; 0 for never.
    held_out: share (0 to 1) of the documents that are held out for evaluation, chosen by the hash of their text.
    held_out_ids: "id" of each further document to hold out, such as a whole book.
    attribution: text that the licence requires in the model card. chat_repeats: as `repeats`, for the chat phase.
    as_text: in the chat phase too, a conversation is plain text, its transcript.
    """

    name: str
    path: Path
    repeats: _Repeats
    held_out: Annotated[float, Meta(ge=0, le=1)]
    licence: str
    held_out_ids: _Texts = ()
    attribution: str = ""
    chat_repeats: _Repeats = 0.0
    as_text: bool = False

    def __post_init__(self) -> None:
        _convert_fields(self)

    @property
    def is_used(self) -> bool:
        """True if documents of the source are trained on or held out."""
        return bool(self.repeats or self.chat_repeats or self.held_out or self.held_out_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Configuration of a training run. Runs with equal configs and equal corpora have equal losses, up to rounding.

    vocab_size: at most 65,536, since the token ids of a corpus are held in memory as uint16.
    sequence_length: tokens per sequence. batch_size: sequences per step.
    warmup_steps, decay_steps: steps at the start with a rising, and steps at the end with a falling learning rate.
    matrix_lr, adam_lr: peak learning rates of Muon (hidden matrices) and AdamW (all other parameters).
    weight_decay: decoupled, on matrices and embeddings. grad_clip: largest norm of the gradients of a step.
    checkpoint_minutes: minutes between saves. evaluate_every: steps between evaluations of held-out texts.
    sample_prompts: prompts that the model card completes; if empty, `PROMPTS`.
    description: sentences about the model, for its model card.
    mask_documents: pack whole documents side by side, with attention within each document. If false, sequences are cut
        from a stream of documents, and attention spans all documents of a sequence.
    chat_steps: number of last steps that train on conversations, may be all steps; if not 0, the tokenizer has ChatML's
        special tokens.
    dropout: dropout rate on the output of attention and MLP.
    repetition_steps: number of last steps that also train against loops, see `OwnCompletions`; needs mask_documents.
    repetition_interval: of these steps, only every n-th trains against loops.
    average_steps: the checkpoint has the mean of the weights after each of the last N steps (Kaddour 2022, arXiv
        2209.14981), where N is this number; 0: the weights after the last step.
    start_from: Kvasir checkpoints. The run starts from the mean of their weights (Wortsman et al. 2022, arXiv
        2203.05482) and takes their tokenizer. A smaller model grows, see model/training/growth.py. Empty: random
        weights, new tokenizer.
    """

    name: str
    seed: _Number
    vocab_size: Annotated[int, Meta(ge=1, le=2**16)]
    model: ModelConfig
    sources: tuple[SourceConfig, ...]
    sequence_length: _Size
    batch_size: _Size
    steps: _Size
    warmup_steps: _Number
    decay_steps: _Number
    matrix_lr: _Positive
    adam_lr: _Positive
    weight_decay: Annotated[float, Meta(ge=0, le=1e9)]
    grad_clip: _Positive
    checkpoint_minutes: _Positive
    evaluate_every: _Size
    sample_prompts: _Texts
    description: str = ""
    mask_documents: bool = False
    chat_steps: _Number = 0
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    repetition_steps: _Number = 0
    repetition_interval: _Size = 1
    average_steps: _Number = 0
    start_from: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        _convert_fields(self)
        has_only_plain_attention = (
            self.model.attention is not AttentionKind.AVERAGE
            and self.model.sliding_window is None
            and self.model.position not in SCORED_POSITIONS
            and self.model.score_soft_cap is None
        )
        requirements = {
            f"name must consist of letters, digits, '-', '_' and '.', not start with '.', and have at most "
            f"{MAX_NAME_CHARACTERS} characters: {self.name!r}": (
                re.fullmatch(r"[\w-][\w.-]*", self.name) and len(self.name) <= MAX_NAME_CHARACTERS
            ),
            "warmup_steps and decay_steps must fit into steps: their sum must be at most steps": (
                self.warmup_steps + self.decay_steps <= self.steps
            ),
            "chat_steps and average_steps must be at most steps": max(self.chat_steps, self.average_steps)
            <= self.steps,
            "mask_documents does not support a sliding_window, attention = 'average', a score_soft_cap or positions "
            "that change attention scores: set mask_documents = false": has_only_plain_attention
            or not self.mask_documents,
            "repetition_steps needs mask_documents = true": self.mask_documents or not self.repetition_steps,
            "no source is trained on: set repeats > 0 for at least one source": (
                self.is_all_chat or any(source.repeats for source in self.sources)
            ),
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
        """Number of token positions of one optimizer step."""
        return self.batch_size * self.sequence_length

    @property
    def is_all_chat(self) -> bool:
        """True if every step trains on the chat sources, so that there is no pretraining phase."""
        return self.chat_steps == self.steps

    @property
    def chat_start(self) -> int:
        """Number of the first step (from 0) of the chat phase; equal to `steps` without a chat phase."""
        return self.steps - self.chat_steps


def _convert_fields(config: SourceConfig | TrainConfig) -> None:
    """Convert the TOML values of a config to the types of its fields; raise ValueError for an unusable value."""
    for field in dataclasses.fields(config):
        if field.name not in ("model", "sources", "path", "start_from"):
            value = getattr(config, field.name)
            try:
                object.__setattr__(config, field.name, msgspec.convert(value, field.type))
            except msgspec.ValidationError as error:
                raise ValueError(f"{field.name}: {error}") from error


def load_train_config(path: Path) -> TrainConfig:
    """Read a TOML recipe. With `extends = "other.toml"`, the recipe inherits the values of the other recipe.

    The keys of both `[model]` tables are merged. Any other value, also the list of sources, replaces the inherited one.
    A recipe with its own sources does not inherit `description` and `sample_prompts`, which describe the sources. The
    tables `[repeats]` and `[chat_repeats]` set these values of sources, by name. Sources that are neither trained on
    nor held out are left out.

    Raises:
        ValueError: a file cannot be read or extends itself, a key is unknown or missing, or a value is unusable.
    """
    values = _read(path, ())
    try:
        model = ModelConfig.from_dict({**values.pop("model"), "vocab_size": values["vocab_size"]})
        sources = values.pop("sources")
        for entry in sources:
            check_keys(SourceConfig, entry, "source")
        used = tuple(source for entry in sources if (source := SourceConfig(**entry)).is_used)
        values = {"sample_prompts": (), **values, "model": model, "sources": used}
        check_keys(TrainConfig, values, "recipe")
        return TrainConfig(**values)
    except KeyError as error:
        raise ValueError(f"recipe {path}: missing {error}; add this key") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"recipe {path}: {error}") from error


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a recipe, merged over the recipe that it extends, with paths relative to their own recipe.

    extended_by: recipes that lead to this one by `extends`.
    """
    if path.resolve() in extended_by:
        raise ValueError(f"{path}: this recipe extends itself; correct its key `extends`")
    advice = f"{extended_by[-1]} extends it, by a path relative to {extended_by[-1].parent}" if extended_by else _ADVICE
    try:
        values = tomllib.loads(path.read_text())
        extended = path.parent / values.pop("extends") if "extends" in values else None
        values = {**values, "model": {**values["model"]}} if "model" in values else values
        for entry in values.get("sources", ()):
            entry["path"] = path.parent / entry["path"]
        repeats = {key: {**values.pop(key, {})} for key in _REPEATS}
        if "start_from" in values:
            places = [values["start_from"]] if isinstance(values["start_from"], str) else values["start_from"]
            if not isinstance(places, list) or "" in places:
                raise TypeError
            values["start_from"] = tuple(path.parent / place for place in places)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"recipe {path}: extends and start_from must be paths, model, repeats and chat_repeats tables, and "
            "sources a list of tables with a path each"
        ) from error
    except OSError as error:
        raise ValueError(f"recipe {path}: {error.strerror}; {advice}") from error
    except ValueError as error:  # includes invalid TOML and invalid UTF-8
        raise ValueError(f"recipe {path}: {error}") from error
    if extended is not None:
        inherited = _read(extended, (*extended_by, path.resolve()))
        if "sources" in values:
            inherited = {key: value for key, value in inherited.items() if key not in _OF_SOURCES}
        values = inherited | values | {"model": inherited.get("model", {}) | values.get("model", {})}
    sources = {str(entry.get("name")): entry for entry in values.get("sources", ())}
    for key, numbers in repeats.items():
        for name, number in numbers.items():
            if name not in sources:
                raise ValueError(f"recipe {path}: {key} names {name!r}, but no source has this name; correct the name")
            sources[name][key] = number
    return values


def write_recipe(path: Path, config: TrainConfig) -> None:
    """Write a config as a recipe, atomically. Paths of sources below its directory are written relative to it."""
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
    """Return the values of a config that differ from their defaults, by field name."""
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
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
