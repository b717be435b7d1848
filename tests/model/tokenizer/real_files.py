"""Directories with the published tokenizer files in tests/data."""

import base64
import lzma
from pathlib import Path

from tests.model.tokenizer.texts import DATA

HASHED = ("cl100k_base", "o200k_base")


def unpack(name: str, directory: Path) -> Path:
    """Unpack a file of tests/data/tokenizers into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(lzma.decompress((DATA / "tokenizers" / f"{name}.xz").read_bytes()))
    return directory


def gpt2(directory: Path) -> Path:
    """Unpack GPT-2's encoder.json and vocab.bpe."""
    unpack("encoder.json", directory)
    return unpack("vocab.bpe", directory)


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Write a file in tiktoken's format."""
    lines = sorted(ranks.items(), key=lambda item: item[1])
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in lines))
