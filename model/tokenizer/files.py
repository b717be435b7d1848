"""Which files of a checkpoint directory hold its tokenizer."""

from pathlib import Path

from model.tokenizer.interface import Tokenizer
from model.tokenizer.native import load_native


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Raises:
        TokenizerError: a file is missing or unusable.
    """
    return load_native(directory)
