"""Writer of recipes: TOML files from which `load_train_config` reads an equal config."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.training.config import TrainConfig
from model.training.data.source_config import SourceConfig


def write_recipe(path: Path, config: TrainConfig, comments: tuple[str, ...] = ()) -> None:
    """Write a recipe atomically. Paths of sources inside its directory are written relative to the directory."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in _lines(path.parent, config, comments)))
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _lines(directory: Path, config: TrainConfig, comments: tuple[str, ...]) -> Iterator[str]:
    yield from (f"# {comment}" for comment in comments)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in ("model", "sources") and value != field.default:
            yield f"{field.name} = {_toml(value)}"
    yield "\n[model]"
    values = config.model.to_dict()
    chosen = (f.name for f in dataclasses.fields(config.model) if getattr(config.model, f.name) != f.default)
    yield from _table({name: values[name] for name in chosen if name != "vocab_size"})
    for source in config.sources:
        yield "\n[[sources]]"
        yield from _table(_facts(directory, source))


def _facts(directory: Path, source: SourceConfig) -> dict[str, Any]:
    path = source.path.resolve()
    inside = directory.resolve() in path.parents
    values = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    defaults = {field.name: field.default for field in dataclasses.fields(source)}
    kept = {name: value for name, value in values.items() if value != defaults[name]}
    return kept | {"path": str(path.relative_to(directory.resolve()) if inside else path)}


def _table(values: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key} = {_toml(value)}" for key, value in values.items() if value is not None)


def _toml(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # JSON strings are valid TOML basic strings, except that JSON does not escape DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(v)}' for key, v in value.items() if v is not None)} }}"
    raise TypeError(f"no TOML for {value!r}")
