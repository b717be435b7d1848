"""Loading of a checkpoint directory's tokenizer in the format of Kvasir, Hugging Face, OpenAI or Meta."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from model.io.files import CheckpointError, read_json
from model.tokenizer.bos_eos import read_tokenizer_config
from model.tokenizer.byte_level import RANKS_FILE, SPEC_FILE, load_native
from model.tokenizer.interface import Tokenizer
from model.tokenizer.openai_files import load_merges, load_published_ranks, load_tokenizer_model
from model.tokenizer.tokenizer_json import TOKENIZER_FILE, tokenizer_from_json


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory; raise CheckpointError if its files are missing or unusable."""
    for name, load in _LOADERS.items():
        if os.path.lexists(directory / name):
            return load(directory)
    if len(ranks := list(directory.glob("*.tiktoken"))) == 1:
        return load_published_ranks(ranks[0])
    raise CheckpointError(f"{directory}: no tokenizer; expected one of {', '.join(_LOADERS)} or one *.tiktoken file")


def _load_json(directory: Path) -> Tokenizer:
    path = directory / TOKENIZER_FILE
    return tokenizer_from_json(path, read_json(path), read_tokenizer_config(directory))


_LOADERS: Mapping[str, Callable[[Path], Tokenizer]] = {
    SPEC_FILE: load_native,
    RANKS_FILE: load_native,
    TOKENIZER_FILE: _load_json,
    "vocab.json": partial(load_merges, vocabulary_file="vocab.json", merges_file="merges.txt"),
    "encoder.json": partial(load_merges, vocabulary_file="encoder.json", merges_file="vocab.bpe"),
    "tokenizer.model": load_tokenizer_model,
}
