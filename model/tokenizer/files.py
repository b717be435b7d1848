"""Loading of the tokenizer of a checkpoint directory, whichever format its files have."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from model.io.json_file import is_named
from model.tokenizer.bos_eos import read_object, read_tokenizer_config
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.tokenizer.native import RANKS_FILE, SPEC_FILE, load_native
from model.tokenizer.openai_files import find_ranks_file, load_merges, load_published_ranks, load_tokenizer_model
from model.tokenizer.tokenizer_json import TOKENIZER_FILE, tokenizer_from_json


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory in the format of Kvasir, Hugging Face, OpenAI or Meta.

    Raises:
        TokenizerError: a file is missing, unusable or unknown; the message names the file.
    """
    load = next((load for name, load in _LOADERS.items() if is_named(directory / name)), None)
    try:
        if load is not None:
            return load(directory)
        if (ranks := find_ranks_file(directory)) is not None:
            return load_published_ranks(ranks)
    except TokenizerError as error:
        raise TokenizerError(f"{directory}/{error}") from error
    raise TokenizerError(f"{directory}: no tokenizer; expected one of {', '.join(_LOADERS)} or one *.tiktoken file")


def _load_json(directory: Path) -> Tokenizer:
    return tokenizer_from_json(directory, read_object(directory / TOKENIZER_FILE), read_tokenizer_config(directory))


_LOADERS: Mapping[str, Callable[[Path], Tokenizer]] = {
    SPEC_FILE: load_native,
    RANKS_FILE: load_native,
    TOKENIZER_FILE: _load_json,
    "vocab.json": partial(load_merges, vocabulary_file="vocab.json", merges_file="merges.txt"),
    "encoder.json": partial(load_merges, vocabulary_file="encoder.json", merges_file="vocab.bpe"),
    "tokenizer.model": load_tokenizer_model,
}
