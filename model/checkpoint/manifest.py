"""Manifest of a checkpoint directory in Kvasir's or Hugging Face's format. Files are verified before loading.

Kvasir's format:

    config.json               the ModelConfig
    model.safetensors         the tensors; over 5 GB: model-00001-of-0000N.safetensors, ... and their index
    tokenizer.tiktoken, tokenizer_spec.json, or another tokenizer that `load_tokenizer` supports
    chat_template.jinja       of a model trained on conversations
    generation_config.json    the model's default sampling parameters (optional)
    manifest.json             size and SHA-256 of every file above, and how the model was made
    MODEL_CARD.md             for readers; not hashed
"""

import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.huggingface.directory import INDEX_FILE, describe_problem, find_weight_files
from model.huggingface.families.family import ModelFamily
from model.huggingface.family_table import read_family_config
from model.huggingface.tensor_placement import Placement, place_tensors
from model.io.files import (
    CheckpointError,
    check_is_file,
    check_is_searchable,
    check_plain_name,
    file_digest,
    parsing,
    read_json,
    reading,
    write_json,
)
from model.sampling.generation_config import GENERATION_CONFIG_FILE
from model.tokenizer.bos_eos import TEMPLATE_FILE
from model.tokenizer.byte_level import RANKS_FILE, SPEC_FILE
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer

CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
FORMAT = "kvasir-checkpoint-1"
MAX_NAME_CHARACTERS = 255  # a directory name's limit; the name is in every response and on every page


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Checkpoint description: directory, name, architecture, files (name -> bytes and SHA-256) and training.

    family: model family that defines the tensors' names and layouts; None for Kvasir's format.
    files: for a Hugging Face directory, which has no hashes, only the weight files, each with the SHA-256 "".
    index: tensor name -> name of its weight file, from model.safetensors.index.json; empty without this file.
    training: facts about the training run; empty for a Hugging Face directory.
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
        """Return the paths of the checkpoint's safetensors files, sorted by name."""
        return [self.directory / name for name in sorted(self.files) if name.endswith(".safetensors")]

    @property
    def num_weight_bytes(self) -> int:
        """Return the total size of the checkpoint's safetensors files in bytes."""
        return sum(self.files[path.name][0] for path in self.weight_files)

    @property
    def weight_dtype(self) -> str:
        """Return the dtype in which most bytes of the weights are stored: BF16, F16 or F32. Raises CheckpointError."""
        num_bytes: Counter[str] = Counter()
        for placement in self.place_tensors().values():
            for header in placement.parts:
                num_bytes[header.dtype] += header.end - header.begin
        return num_bytes.most_common(1)[0][0]

    @property
    def created_seconds(self) -> int:
        """Return when manifest.json (config.json in Hugging Face's format) was last written, in seconds since 1970."""
        path = self.directory / (MANIFEST_FILE if self.family is None else CONFIG_FILE)
        return int(path.stat().st_mtime)

    def verify(self) -> Tokenizer:
        """Check files' hashes and tensors' names, shapes and dtypes; return the tokenizer. Raises CheckpointError.

        A thread checks the files while the tokenizer is loaded. An error of a damaged file replaces all other errors.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            checked = pool.submit(self._check_files)
            try:
                placements, tokenizer = self.place_tensors(), load_tokenizer(self.directory)
            finally:
                checked.result()
        if tokenizer.vocab_size > self.config.vocab_size:
            embedding = placements["token_embedding.weight"].parts[0]
            raise CheckpointError(
                f"{embedding.path}: tensor {embedding.name} has {self.config.vocab_size} rows, the tokenizer beside it "
                f"{tokenizer.vocab_size} tokens, so some tokens have no embedding; "
                "use the tokenizer of this model's training"
            )
        return tokenizer

    def _check_files(self) -> None:
        for name, (size, digest) in self.files.items():
            _check_file(self.directory / name, size, digest)

    def place_tensors(self) -> dict[str, Placement]:
        """Find the stored tensors that make up each model tensor; see `model.huggingface.tensor_placement`."""
        return place_tensors(
            self.directory, config=self.config, family=self.family, files=self.weight_files, index=self.index
        )


def read_manifest(directory: Path | str) -> Manifest:
    """Read manifest.json and config.json of a checkpoint directory, not the other files. Raises CheckpointError."""
    directory = Path(directory)
    check_is_searchable(directory)
    if os.path.lexists(directory / MANIFEST_FILE):
        return _read_native(directory)
    if not os.path.lexists(directory / CONFIG_FILE):
        raise CheckpointError(describe_problem(directory))
    values = read_json(directory / CONFIG_FILE)
    if "model_type" not in values and "architectures" not in values:
        return _read_native(directory)  # raises: manifest.json is missing
    family, config = read_family_config(directory / CONFIG_FILE, values)
    names, index = find_weight_files(directory)
    with reading(directory):
        files = {name: ((directory / name).stat().st_size, "") for name in names}
    name = _name_of(directory)
    return Manifest(directory=directory, name=name, config=config, files=files, training={}, family=family, index=index)


def _read_native(directory: Path) -> Manifest:
    path = directory / MANIFEST_FILE
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path}: its format is {values.get('format')!r}, not {FORMAT!r}; save the model again")
    with parsing(path):
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in values["files"].items()}
        name, training = values["name"], dict(values["training"])
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise CheckpointError(
            f"{path}: the model's name {name!r} cannot be shown; "
            f"give the model a name of 1 to {MAX_NAME_CHARACTERS} printable characters"
        )
    for file_name in files:
        check_plain_name(path, file_name)
    has_tokenizer = not all(name in (CONFIG_FILE, INDEX_FILE) or name.endswith(".safetensors") for name in files)
    if CONFIG_FILE not in files or not has_tokenizer:
        missing = "a tokenizer" if CONFIG_FILE in files else CONFIG_FILE
        raise CheckpointError(f"{path}: its list of files lacks {missing}; save the model again")
    config_path = directory / CONFIG_FILE
    config_values = read_json(config_path)
    try:
        config = ModelConfig.from_dict(config_values)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{config_path}: {error}; correct the config") from error
    return Manifest(directory=directory, name=name, config=config, files=files, training=training)


def write_manifest(
    directory: Path, *, name: str, training: dict[str, Any], tokenizer_files: tuple[str, ...] = (RANKS_FILE, SPEC_FILE)
) -> None:
    """Hash the files of an otherwise complete checkpoint directory, and write its manifest.json atomically."""
    optional = [name for name in (TEMPLATE_FILE, GENERATION_CONFIG_FILE, INDEX_FILE) if (directory / name).exists()]
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    names = dict.fromkeys((CONFIG_FILE, *tokenizer_files, *optional, *shards))
    files = {n: {"bytes": (directory / n).stat().st_size, "sha256": file_digest(directory / n)} for n in names}
    values = {"format": FORMAT, "name": name, "files": files, "training": training}
    partial = directory / (MANIFEST_FILE + ".partial")
    write_json(partial, values)
    partial.replace(directory / MANIFEST_FILE)


def _check_file(path: Path, size: int, digest: str) -> None:
    check_is_file(path)
    if (actual := path.stat().st_size) != size:
        raise CheckpointError(f"{path}: {actual} bytes, {size} expected; the copy is incomplete, copy the file again")
    if digest and file_digest(path) != digest.lower():
        raise CheckpointError(f"{path}: SHA-256 differs from {MANIFEST_FILE}; the file is damaged, copy the file again")


def _name_of(directory: Path) -> str:
    """Return the model's name: the directory's, or NAME in Hugging Face's cache models--owner--NAME/snapshots/hash."""
    directory = directory.absolute()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    name = directory.resolve().name
    return name if name.strip() and name.isprintable() else "model"
