"""Manifest of a checkpoint directory, in our own format or Hugging Face's, read and verified without torch.

Our own format:

    config.json               the ModelConfig
    model.safetensors         the tensors; over 5 GB: model-00001-of-0000N.safetensors, ... and their index
    tokenizer.tiktoken, tokenizer_spec.json, or another tokenizer that `load_tokenizer` supports
    chat_template.jinja       of a model trained on conversations
    generation_config.json    the model's default sampling parameters, if they differ from the usual ones
    manifest.json             size and SHA-256 of every file above, and how the model was made
    MODEL_CARD.md             for readers; not hashed

Hugging Face's format, for the families in `model.huggingface.families`: config.json with a `model_type`,
model.safetensors or model.safetensors.index.json and its shards, the tokenizer's files, generation_config.json.

Everything is checked before a tensor is loaded. The error for a damaged directory is one line: the faulty file, and
the remedy.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.chat.template import TEMPLATE_FILE
from model.config import ModelConfig
from model.huggingface.directory import INDEX_FILE, find_weight_files, what_is_wrong
from model.huggingface.families.family import ModelFamily
from model.huggingface.family_table import read_family_config
from model.huggingface.tensor_placement import Placement, place_tensors
from model.io.checkpoint_files import (
    CheckpointError,
    check_is_file,
    check_is_searchable,
    check_plain_name,
    file_digest,
    read_json,
)
from model.io.json_file import is_named
from model.io.permissions import read_problem
from model.sampling.generation_config import GENERATION_CONFIG_FILE
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.tokenizer.native import RANKS_FILE, SPEC_FILE

__all__ = [
    "CONFIG_FILE",
    "MANIFEST_FILE",
    "CheckpointError",
    "Manifest",
    "file_digest",
    "read_manifest",
    "write_manifest",
]

CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
FORMAT = "kvasir-checkpoint-1"
MAX_NAME_CHARACTERS = 255  # a directory name's limit; the name is in every response and on every page


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Checkpoint description: directory, name, architecture, files (name -> size and SHA-256) and provenance.

    family: model family that defines the tensors' names and layouts; None for our own format.
    files: a Hugging Face directory has no hashes, so its SHA-256 is "", and only weight files are listed.
    index: tensor -> file, from an index file; empty without an index file.
    """

    directory: Path
    name: str
    config: ModelConfig
    files: dict[str, tuple[int, str]]
    training: dict[str, Any]
    family: ModelFamily | None = None
    index: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_files(self) -> list[Path]:
        """Return the safetensors files, in order."""
        return [self.directory / name for name in sorted(self.files) if name.endswith(".safetensors")]

    @property
    def num_weight_bytes(self) -> int:
        """Return the bytes of the weight files."""
        return sum(size for name, (size, _) in self.files.items() if name.endswith(".safetensors"))

    @property
    def weight_dtype(self) -> str:
        """Return the dtype of most of the weights' bytes, as safetensors names it: BF16, F16 or F32.

        Raises:
            CheckpointError: see `place_tensors`.
        """
        num_bytes: Counter[str] = Counter()
        for placement in self.place_tensors().values():
            for header in placement.parts:
                num_bytes[header.dtype] += header.end - header.begin
        return num_bytes.most_common(1)[0][0]

    @property
    def created_seconds(self) -> int:
        """Return the time at which the checkpoint was written on this machine, in seconds since 1970."""
        path = self.directory / (MANIFEST_FILE if self.family is None else CONFIG_FILE)
        return int(path.stat().st_mtime)

    def verify(self) -> Tokenizer:
        """Check every file's presence, size and hash, the tokenizer, and every tensor's name, shape and dtype.

        Returns the tokenizer, which is read for the check.

        Raises:
            CheckpointError: the first fault found.
        """
        for name, (size, digest) in self.files.items():
            _check_file(self.directory / name, size, digest)
        placements = self.place_tensors()
        try:
            tokenizer = load_tokenizer(self.directory)
        except TokenizerError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.vocab_size > self.config.vocab_size:
            embedding = placements["token_embedding.weight"].parts[0]
            raise CheckpointError(
                f"{embedding.path}: tensor {embedding.name} has {self.config.vocab_size} rows, the tokenizer beside it "
                f"{tokenizer.vocab_size} tokens, so some have no embedding; use the tokenizer of its training"
            )
        return tokenizer

    def place_tensors(self) -> dict[str, Placement]:
        """Return the sources of each tensor of the model, from the files' headers.

        Raises:
            CheckpointError: a file is damaged, or the tensors are not those of the config.
        """
        return place_tensors(
            self.directory, config=self.config, family=self.family, files=self.weight_files, index=self.index
        )


def read_manifest(directory: Path | str) -> Manifest:
    """Read manifest.json and config.json of a checkpoint; `Manifest.verify` checks the rest.

    Raises:
        CheckpointError: the directory or a file is missing, unreadable, not JSON, names files outside the directory, or
            describes an unsupported model.
    """
    directory = Path(directory)
    check_is_searchable(directory)
    if is_named(directory / MANIFEST_FILE):
        return _read_native(directory)
    if not is_named(directory / CONFIG_FILE):
        raise CheckpointError(what_is_wrong(directory))
    values = read_json(directory / CONFIG_FILE)
    if "model_type" not in values and "architectures" not in values:
        return _read_native(directory)  # raises: manifest.json is missing
    return _read_hugging_face(directory, values)


def _read_hugging_face(directory: Path, values: dict[str, Any]) -> Manifest:
    family, config = read_family_config(directory / CONFIG_FILE, values)
    weights = find_weight_files(directory)
    return Manifest(
        directory=directory,
        name=_name_of(directory),
        config=config,
        files={name: (_size_of(directory / name), "") for name in weights.names},
        training={},
        family=family,
        index=weights.index,
    )


def _read_native(directory: Path) -> Manifest:
    values = read_json(directory / MANIFEST_FILE)
    if values.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: format {values.get('format')!r}, {FORMAT!r} expected; save the model again"
        )
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in values["files"].items()}
        name, training = values["name"], dict(values["training"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: name, files or training is malformed; copy the file again"
        ) from error
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: the name {name!r} cannot be shown; "
            f"give it one of at most {MAX_NAME_CHARACTERS} printable characters"
        )
    for file_name in files:
        check_plain_name(directory / MANIFEST_FILE, file_name)
    if CONFIG_FILE not in files:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: {CONFIG_FILE} is not in the list of files; save the model again"
        )
    if all(file_name in (CONFIG_FILE, INDEX_FILE) or file_name.endswith(".safetensors") for file_name in files):
        raise CheckpointError(f"{directory / MANIFEST_FILE}: no tokenizer is listed; save the model again")
    try:
        config = ModelConfig.from_dict(read_json(directory / CONFIG_FILE))
    except CheckpointError:
        raise
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory / CONFIG_FILE}: {error}; correct the config") from error
    return Manifest(directory=directory, name=name, config=config, files=files, training=training)


def write_manifest(
    directory: Path, *, name: str, training: dict[str, Any], tokenizer_files: tuple[str, ...] = (RANKS_FILE, SPEC_FILE)
) -> None:
    """Hash the directory's files and write manifest.json atomically. Call it last."""
    optional = [name for name in (TEMPLATE_FILE, GENERATION_CONFIG_FILE, INDEX_FILE) if (directory / name).exists()]
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    names = dict.fromkeys((CONFIG_FILE, *tokenizer_files, *optional, *shards))
    files = {n: {"bytes": (directory / n).stat().st_size, "sha256": file_digest(directory / n)} for n in names}
    values = {"format": FORMAT, "name": name, "files": files, "training": training}
    partial = directory / (MANIFEST_FILE + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(directory / MANIFEST_FILE)


def _check_file(path: Path, size: int, digest: str) -> None:
    if not is_named(path):
        raise CheckpointError(f"{path}: missing; restore the file or train again")
    check_is_file(path)
    if path.stat().st_size != size:
        actual = path.stat().st_size
        raise CheckpointError(f"{path}: {actual} bytes, {size} expected; the copy is incomplete, copy it again")
    if not digest:
        return
    try:
        actual_digest = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {read_problem(path, error)}") from error
    if actual_digest != digest.lower():
        raise CheckpointError(f"{path}: SHA-256 differs from {MANIFEST_FILE}; the file is damaged, copy it again")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {read_problem(path, error)}") from error


def _name_of(directory: Path) -> str:
    """Return the directory's name; in the Hugging Face cache (models--owner--name/snapshots/hash) the model's."""
    directory = directory.absolute()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    name = directory.resolve().name
    return name if name.strip() and name.isprintable() else "model"
