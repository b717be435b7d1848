"""nanoGPT's meta.pkl, one token a character, as a tokenizer.json: a WordLevel model behind a split at each one."""

from pathlib import Path
from typing import Any

from model.checkpoint_files import CheckpointError
from model.conversion.pickles import read_plain_pickle


def read_characters(path: Path) -> dict[str, int]:
    """The id of each character, from `stoi` of a meta.pkl.

    Raises:
        CheckpointError: the file is damaged, asks for code, or is not a table of characters.
    """
    values = read_plain_pickle(path)
    ids = values.get("stoi") if isinstance(values, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise CheckpointError(f"{path}: no stoi, the table of characters; give the meta.pkl the model was trained with")
    if not all(isinstance(character, str) and len(character) == 1 for character in ids):
        raise CheckpointError(f"{path}: stoi has tokens that are not one character; write a tokenizer.json instead")
    if sorted(ids.values()) != list(range(len(ids))):
        raise CheckpointError(
            f"{path}: stoi's ids are not 0 to {len(ids) - 1}; give the file nanoGPT's prepare.py wrote"
        )
    return ids


def tokenizer_json(ids: dict[str, int]) -> dict[str, Any]:
    """The object of a tokenizer.json that gives each character its id, and refuses all others."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        # Any character, a line break too, is a piece of its own.
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        # The token for unknown characters is not in the vocabulary: the library refuses them.
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unknown>"},
    }
