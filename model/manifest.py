"""A checkpoint directory's facts, read and verified without torch.

    config.json               the ModelConfig
    model-00001-of-0000N.safetensors   the tensors
    tokenizer.tiktoken, tokenizer_spec.json
    manifest.json             size and SHA-256 of every file above, and how the model came to be
    MODEL_CARD.md             for people; not hashed

Everything is checked before a tensor is loaded: a damaged directory ends in one line that says which file is wrong
and what to do.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.tokenizer.interface import TokenizerError
from model.tokenizer.native import RANKS_FILE, SPEC_FILE, load_native

CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
FORMAT = "kvasir-checkpoint-1"
_SAFETENSORS_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line: the file, what is wrong, what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A checkpoint's directory, name, architecture, files (name -> size and SHA-256) and provenance."""

    directory: Path
    name: str
    config: ModelConfig
    files: dict[str, tuple[int, str]]
    training: dict[str, Any]

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors shards, in order."""
        return [self.directory / name for name in sorted(self.files) if name.endswith(".safetensors")]

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(size for name, (size, _) in self.files.items() if name.endswith(".safetensors"))

    def verify(self) -> None:
        """Check every file's presence, size and hash, and every tensor's name and shape against the config.

        Raises:
            CheckpointError: the first thing that is wrong.
        """
        for name, (size, digest) in self.files.items():
            path = self.directory / name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing; restore the file or train again")
            if path.stat().st_size != size:
                actual = path.stat().st_size
                raise CheckpointError(f"{path}: {actual} bytes, {size} expected; the copy is incomplete, copy it again")
            try:
                actual_digest = file_digest(path)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}; let this user read it") from error
            if actual_digest != digest.lower():
                raise CheckpointError(
                    f"{path}: SHA-256 differs from {MANIFEST_FILE}; the file is damaged, copy it again"
                )
        try:
            vocab_size = load_native(self.directory).vocab_size
        except TokenizerError as error:
            raise CheckpointError(f"{self.directory}: {error}") from error
        if vocab_size > self.config.vocab_size:
            sizes = f"{vocab_size} tokens, the model's vocab_size is {self.config.vocab_size}"
            raise CheckpointError(f"{self.directory / RANKS_FILE}: {sizes}; they are not of one model")
        expected = self.config.parameter_shapes()
        found: dict[str, Path] = {}
        for path in self.weight_files:
            for name, shape in read_shapes(path).items():
                if name not in expected:
                    raise CheckpointError(
                        f"{path}: tensor {name} is not part of the model that {CONFIG_FILE} describes"
                    )
                if shape != expected[name]:
                    raise CheckpointError(
                        f"{path}: tensor {name} has shape {shape}, {CONFIG_FILE} asks for {expected[name]}"
                    )
                if name in found:
                    raise CheckpointError(f"{path}: tensor {name} stands in {found[name].name} too")
                found[name] = path
        if missing := [name for name in expected if name not in found]:
            raise CheckpointError(
                f"{self.directory}: tensor {missing[0]} is in no safetensors file ({len(missing)} missing)"
            )


def read_manifest(directory: Path | str) -> Manifest:
    """Read config.json and manifest.json; `Manifest.verify` checks the rest.

    Raises:
        CheckpointError: the directory or a file is missing, not JSON, or names files outside the directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; --checkpoint wants a checkpoint directory")
    values = _read_json(directory / MANIFEST_FILE)
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{directory / MANIFEST_FILE}: format {values.get('format')!r}, {FORMAT!r} expected")
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in values["files"].items()}
        name, training = str(values["name"]), dict(values["training"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{directory / MANIFEST_FILE}: name, files or training is malformed") from error
    if not name.strip() or not name.isprintable():
        raise CheckpointError(f"{directory / MANIFEST_FILE}: the name {name!r} cannot be shown")
    for file_name in files:
        if Path(file_name).name != file_name or file_name in (".", "..") or len(file_name) > 255:
            raise CheckpointError(f"{directory / MANIFEST_FILE}: {file_name!r} is not a plain file name")
    for required in (CONFIG_FILE, RANKS_FILE, SPEC_FILE):
        if required not in files:
            raise CheckpointError(f"{directory / MANIFEST_FILE}: {required} is not listed")
    try:
        config = ModelConfig.from_dict(_read_json(directory / CONFIG_FILE))
    except CheckpointError:
        raise
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory / CONFIG_FILE}: {error}") from error
    return Manifest(directory=directory, name=name, config=config, files=files, training=training)


def write_manifest(directory: Path, *, name: str, training: dict[str, Any]) -> None:
    """Hash what stands in the directory and write manifest.json beside it, last and atomically."""
    names = [CONFIG_FILE, RANKS_FILE, SPEC_FILE, *sorted(path.name for path in directory.glob("*.safetensors"))]
    files = {n: {"bytes": (directory / n).stat().st_size, "sha256": file_digest(directory / n)} for n in names}
    values = {"format": FORMAT, "name": name, "files": files, "training": training}
    partial = directory / (MANIFEST_FILE + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(directory / MANIFEST_FILE)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes from a safetensors header: 8 bytes of length, then JSON.

    Raises:
        CheckpointError: the header is malformed, a dtype is unknown, or the data is not as long as promised.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise CheckpointError(f"{path}: not a safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        shapes = {}
        end = 0
        for name, entry in header.items():
            if entry["dtype"] not in _SAFETENSORS_BYTES:
                known = ", ".join(_SAFETENSORS_BYTES)
                raise CheckpointError(f"{path}: tensor {name} is {entry['dtype']}, one of {known} expected")
            shapes[name] = tuple(int(size) for size in entry["shape"])
            end = max(end, int(entry["data_offsets"][1]))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file") from error
    if path.stat().st_size != 8 + length + end:
        raise CheckpointError(f"{path}: truncated or padded; copy it again")
    return shapes


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; is this a checkpoint directory?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: a JSON object expected")
    return values
