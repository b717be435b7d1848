"""Directories with the published tokenizer files that tests/data carries."""

import base64
import lzma
from pathlib import Path

from tests.model.tokenizer.texts import DATA

HASHED = ("cl100k_base", "o200k_base")


def unpack(name: str, directory: Path) -> Path:
    """One file of tests/data/tokenizers, unpacked into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(lzma.decompress((DATA / "tokenizers" / f"{name}.xz").read_bytes()))
    return directory


def gpt2(directory: Path) -> Path:
    """encoder.json and vocab.bpe."""
    unpack("encoder.json", directory)
    return unpack("vocab.bpe", directory)


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """A file in tiktoken's format."""
    lines = sorted(ranks.items(), key=lambda item: item[1])
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in lines))
