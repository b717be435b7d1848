"""Manifest of a checkpoint in Kvasir's or Hugging Face's format, or of a GGUF file.

Before loading, sizes of files are checked, and in Kvasir's format their SHA-256. The other formats have no
manifest.json: the manifest is made from the config and the weight files, or from the GGUF file's header.

Kvasir's format:

    config.json               the ModelConfig
    model.safetensors         the tensors; over 5 GB: model-00001-of-0000N.safetensors, ... and their index
    tokenizer.tiktoken, tokenizer_spec.json, or another tokenizer that `load_tokenizer` supports
    chat_template.jinja       of a model trained on conversations
    generation_config.json    the model's default sampling parameters (optional)
    manifest.json             size and SHA-256 of every file above, and how the model was made
    MODEL_CARD.md             for readers; not hashed
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.gguf.architectures import read_architecture
from model.gguf.container import is_gguf, read_gguf
from model.gguf.tensor_types import TENSOR_TYPES
from model.huggingface.directory import INDEX_FILE, describe_problem, find_weight_files
from model.huggingface.families.reading.family import Layout, ModelFamily
from model.huggingface.family_table import read_family_config
from model.huggingface.quantization_config import QUANTIZATION_KEY, GgufEncoding, StoredQuantization, read_quantization
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
from model.io.safetensors_header import WEIGHT_DTYPES
from model.tokenizer.bos_eos import TEMPLATE_FILE
from model.tokenizer.byte_level import RANKS_FILE, SPEC_FILE
from model.tokenizer.files import load_tokenizer
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE
from model.tokenizer.interface import Tokenizer

CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
FORMAT = "kvasir-checkpoint-1"
MAX_NAME_CHARACTERS = 255  # a directory name's limit; the name is in every response and on every page
_UNKNOWN_SPLIT = (
    "tokenizer.ggml.pre is missing, so texts are split as by GPT-2; another model then gets wrong tokens; convert the "
    "model again"
)


@dataclass(frozen=True, kw_only=True)  # no slots, for the cached property
class Manifest:
    """Description of a checkpoint: directory, name, architecture, files (name -> bytes and SHA-256) and training.

    directory: path of the checkpoint; a GGUF file is a checkpoint by itself.
    family: model family that defines the tensors' names and layouts; None for Kvasir's format.
    files: for a Hugging Face directory or GGUF file, which has no hashes, only weight files, with the SHA-256 "".
    index: tensor name -> name of its weight file, from model.safetensors.index.json; empty without this file.
    quantization: encoding of quantized matrices; None: no matrix is quantized.
    training: facts about the training run; empty for a Hugging Face directory or GGUF file.
    config_warnings: warnings about keys of config.json that are ignored, or about a missing key of a GGUF file.
    """

    directory: Path
    name: str
    config: ModelConfig
    files: dict[str, tuple[int, str]]
    training: dict[str, Any]
    family: ModelFamily | None = None
    index: Mapping[str, str] = field(default_factory=dict)
    quantization: StoredQuantization | None = None
    config_warnings: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """Return the part of the checkpoint that is not served, in words; empty: nothing."""
        return "" if self.family is None else self.family.left_out

    def path_of(self, name: str) -> Path:
        """Return the path of the checkpoint's file with this name; always the GGUF file, if the checkpoint is one."""
        return self.directory if is_gguf(self.directory) else self.directory / name

    @property
    def weight_files(self) -> list[Path]:
        """Return the paths of the checkpoint's safetensors or GGUF files, sorted by name."""
        return [
            self.path_of(name)
            for name in sorted(self.files)
            if name.endswith(".safetensors") or is_gguf(self.directory)
        ]

    @property
    def num_weight_bytes(self) -> int:
        """Return the total size of the checkpoint's safetensors or GGUF files in bytes."""
        return sum(self.files[path.name][0] for path in self.weight_files)

    @property
    def weight_dtype(self) -> str:
        """Return the dtype of most bytes of the unquantized weights: BF16, F16 or F32. Raises CheckpointError."""
        num_bytes: Counter[str] = Counter()
        for placement in self.placements.values():
            for header in () if placement.encoded else placement.parts:
                num_bytes[header.dtype] += header.end - header.begin
        return num_bytes.most_common(1)[0][0]

    @property
    def num_quantized(self) -> int:
        """Return the number of weights that stay quantized on a CPU: those of quantized matrices, except fp8.

        Raises CheckpointError.
        """
        if self.quantization is None or not self.quantization.is_kept:
            return 0
        return sum(math.prod(place.shape) for place in self.placements.values() if place.encoded)

    @property
    def created_seconds(self) -> int:
        """Return the time at which the checkpoint was last written, in seconds since 1970.

        The time is that of manifest.json, of config.json in Hugging Face's format, or of the GGUF file.
        """
        path = self.path_of(MANIFEST_FILE if self.family is None else CONFIG_FILE)
        return int(path.stat().st_mtime)

    def verify(self) -> Tokenizer:
        """Check files' sizes and hashes, tensors' names, shapes and dtypes, and the tokenizer; return the tokenizer.

        Raises CheckpointError, also if the tokenizer has more tokens than the model.

        A thread checks the files while the tokenizer is loaded. If a file is damaged, only that error is raised:
        the damage may have caused the other errors.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            checked = pool.submit(self.check_files)
            try:
                _, tokenizer = self.placements, load_tokenizer(self.directory)
            finally:
                checked.result()
        self.check_tokenizer(tokenizer)
        return tokenizer

    def check_files(self, *, has_hashes: bool = True) -> None:
        """Check every file's size, and with `has_hashes` its SHA-256 if `files` has one. Raises CheckpointError."""
        for name, (size, digest) in self.files.items():
            _check_file(self.path_of(name), size, digest if has_hashes else "")

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise CheckpointError if the tokenizer has more tokens than the model's embedding has rows."""
        if tokenizer.vocab_size > self.config.vocab_size:
            embedding = self.placements["token_embedding.weight"].parts[0]
            raise CheckpointError(
                f"{embedding.path}: tensor {embedding.name} has {self.config.vocab_size} rows, the tokenizer beside it "
                f"{tokenizer.vocab_size} tokens, so some tokens have no embedding; "
                "use the tokenizer of this model's training"
            )

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        """Return the stored tensors that make up each model tensor, by model tensor name. Raises CheckpointError.

        See `place_tensors`.
        """
        return place_tensors(
            self.directory,
            config=self.config,
            family=self.family,
            files=self.weight_files,
            index=self.index,
            encoding=None if self.quantization is None else self.quantization.encoding,
        )


def read_manifest(directory: Path | str) -> Manifest:
    """Return the manifest of a checkpoint directory or GGUF file. Raises CheckpointError.

    Sources: manifest.json and config.json; in Hugging Face's format config.json and file names; a GGUF file's header.
    """
    directory = Path(directory)
    check_is_searchable(directory)
    if is_gguf(directory):
        return _read_gguf_manifest(directory)
    if os.path.lexists(directory / MANIFEST_FILE):
        return _read_native(directory)
    if not os.path.lexists(directory / CONFIG_FILE):
        raise CheckpointError(describe_problem(directory))
    values = read_json(directory / CONFIG_FILE)
    if "model_type" not in values and "architectures" not in values:
        return _read_native(directory)  # raises: manifest.json is missing
    stored = values.pop(QUANTIZATION_KEY, None)
    warnings: list[str] = []
    family, config = read_family_config(directory / CONFIG_FILE, values, warnings)
    quantization = read_quantization(directory / CONFIG_FILE, stored)
    if quantization is not None and any(names.layout is Layout.TRANSPOSED for names in family.names.values()):
        raise CheckpointError(
            f"{directory / CONFIG_FILE}: quantized {family.model_type} models are not supported; "
            "use the unquantized checkpoint"
        )
    names, index = find_weight_files(directory)
    with reading(directory):
        files = {name: ((directory / name).stat().st_size, "") for name in names}
    name = _name_of(directory)
    return Manifest(
        directory=directory,
        name=name,
        config=config,
        files=files,
        training={},
        family=family,
        index=index,
        quantization=quantization,
        config_warnings=tuple(warnings),
    )


def _read_gguf_manifest(path: Path) -> Manifest:
    """Return the manifest of a GGUF file. The model's name is that in the metadata, else the file's, else "model"."""
    file = read_gguf(path)
    family, config = read_architecture(file)
    given = file.text("general.name") or ""
    name = given if _is_shown(given) else path.stem if _is_shown(path.stem) else "model"
    files = {path.name: (path.stat().st_size, "")}
    quantized = sorted({header.dtype for header in file.tensors.values()} - {*WEIGHT_DTYPES})
    bits = sorted({TENSOR_TYPES[name].served_bits for name in quantized})
    groups = "of 16 and 32" if 6 in bits else "of 32"
    text = f"{' and '.join(f'int{each}' for each in bits)} in groups {groups}, from GGUF's {', '.join(quantized)}"
    is_split_unknown = file.text("tokenizer.ggml.model") == "gpt2" and not file.text("tokenizer.ggml.pre")
    return Manifest(
        directory=path,
        name=name,
        config=config,
        files=files,
        training={},
        family=family,
        quantization=StoredQuantization(GgufEncoding(), text) if quantized else None,
        config_warnings=(f"{path}: {_UNKNOWN_SPLIT}",) if is_split_unknown else (),
    )


def _is_shown(name: str) -> bool:
    return bool(name.strip()) and name.isprintable() and len(name) <= MAX_NAME_CHARACTERS


def _read_native(directory: Path) -> Manifest:
    path = directory / MANIFEST_FILE
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path}: its format is {values.get('format')!r}, not {FORMAT!r}; save the model again")
    with parsing(path):
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in values["files"].items()}
        name, training = values["name"], dict(values["training"])
    if not isinstance(name, str) or not _is_shown(name):
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
    quantization = read_quantization(config_path, config_values.pop(QUANTIZATION_KEY, None))
    try:
        config = ModelConfig.from_dict(config_values)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{config_path}: {error}; correct the config") from error
    return Manifest(
        directory=directory, name=name, config=config, files=files, training=training, quantization=quantization
    )


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
    """Return the model's name: NAME in Hugging Face's cache models--owner--NAME/snapshots/hash, else the directory's.

    An empty or unprintable name becomes "model".
    """
    directory = directory.absolute()
    repository = directory.parent.parent.name
    is_cached = directory.parent.name == "snapshots" and repository.startswith("models--")
    name = repository.rpartition("--")[2] if is_cached else directory.resolve().name
    return name if _is_shown(name) else "model"
