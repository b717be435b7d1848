"""Import of nanoGPT's ckpt.pt as a Kvasir checkpoint.

nanoGPT is GPT-2 with exact GELU and optional biases. Source: model.py of github.com/karpathy/nanoGPT.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.conversion.import_pickles import read_plain_pickle, read_torch_file
from model.checkpoint.loading import write_weights
from model.checkpoint.manifest import Manifest, read_manifest, write_manifest
from model.checkpoint.weights import DTYPES
from model.config import ModelConfig
from model.huggingface.families.gpt import GPT2
from model.huggingface.families.reading.family import convert_config, plain, sources
from model.huggingface.families.reading.reader import ConfigReader
from model.io.files import CheckpointError, written_whole
from model.tokenizer.files import load_tokenizer

_COMPILED = "_orig_mod."  # prefix of every name after torch.compile
# Files of a tokenizer in all formats that `load_tokenizer` supports, besides *.tiktoken.
_TOKENIZER_FILES = (
    *("tokenizer_spec.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "vocab.bpe", "encoder.json", "added_tokens.json", "tokenizer.model"),
)


# Keys of model_args, and the keys of GPT-2's config that mean the same. `dropout` matters in training only.
_ARGUMENTS = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
_ARGUMENTS |= {"block_size": "n_positions", "dropout": "resid_pdrop"}
# GPT-2's names; nanoGPT stores all weights as (out, in).
_NANOGPT = dataclasses.replace(
    GPT2,
    names={module: plain(names.modules[0]) for module, names in GPT2.names.items()},
    ignored_tensors=(r"h\.\d+\.attn\.bias",),  # the causal mask of versions without flash attention
)


def convert_nanogpt(path: Path, tokenizer: Path, out: Path) -> Manifest:
    """Convert nanoGPT's ckpt.pt and its tokenizer to the Kvasir checkpoint directory `out`; return its manifest.

    Args:
        tokenizer: a directory or file in a format that `load_tokenizer` supports (such as GPT-2's), or nanoGPT's
            meta.pkl, a vocabulary of characters.

    Raises:
        CheckpointError: a file is damaged or would run code, the tokenizer has more tokens than the model, or `out` is
            not empty.
    """
    with written_whole(out) as directory:
        config, tensors, facts = _read_checkpoint(path)
        files = _write_tokenizer(tokenizer, directory)
        write_weights(directory, config, tensors)
        training = {**facts, "source": path.name}
        write_manifest(directory, name=out.absolute().name, training=training, tokenizer_files=files)
        read_manifest(directory).verify()
    return read_manifest(out)


def _read_checkpoint(path: Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, float]]:
    """Read a ckpt.pt: return the architecture, tensors under Kvasir's names, and the training's steps and best loss."""
    values = read_torch_file(path)
    arguments, state = values.get("model_args"), values.get("model")
    if not isinstance(arguments, Mapping) or not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path}: has no entries model and model_args; give the ckpt.pt that nanoGPT's train.py wrote"
        )
    config = _read_config(path, arguments)
    found = {_short_name(str(name)): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    head, embedding = found.get("lm_head.weight"), found.get("wte.weight")
    if head is not None and embedding is not None:
        tied = head.shape == embedding.shape and torch.equal(head, embedding)
        config = dataclasses.replace(config, tie_embeddings=tied)
    facts = {"steps": values.get("iter_num"), "best_val_loss": values.get("best_val_loss")}
    training = {name: fact.item() if isinstance(fact, Tensor) else fact for name, fact in facts.items()}
    numbers = {name: fact for name, fact in training.items() if isinstance(fact, (int, float))}
    return config, _place_tensors(path, config, found), numbers


def _read_config(path: Path, arguments: Mapping[str, Any]) -> ModelConfig:
    """Convert a ckpt.pt's model_args to a ModelConfig: GPT-2 with exact GELU, and without biases if `bias` is false."""
    values = {"vocab_size": 50304, **arguments}
    bias = values.pop("bias", True)
    reader = ConfigReader(path, {})
    for key in values.keys() - _ARGUMENTS.keys():
        reader.reject(str(key), values[key], "unknown key; give the ckpt.pt of an unmodified nanoGPT")
    if not isinstance(bias, bool):
        reader.reject("bias", bias, "expected true or false; correct model_args")
    named = {_ARGUMENTS[key]: value for key, value in values.items()}
    config = convert_config(GPT2, ConfigReader(path, {**named, "activation_function": "gelu"}))
    return dataclasses.replace(
        config, norm_bias=bias, attention_bias=bias, attention_out_bias=bias, mlp_bias=bias, tie_embeddings=True
    )


def _short_name(name: str) -> str:
    return name.removeprefix(_COMPILED).removeprefix(_NANOGPT.prefix)


def _place_tensors(path: Path, config: ModelConfig, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a ckpt.pt's tensors under Kvasir's names, taken from `found`.

    Raises CheckpointError if a tensor is missing or extra, or has a wrong shape or a dtype other than floats.
    """
    tensors = {}
    for name, source in sources(config, _NANOGPT).items():
        ((part, shape),) = source.shapes.items()
        tensor = found.pop(part, None)
        if tensor is None:
            raise CheckpointError(
                f"{path}: tensor {part}, which model_args require, is missing; use the model_args of its training"
            )
        if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{path}: tensor {part} is {tensor.dtype} of shape {tuple(tensor.shape)}, but model_args require "
                f"floats of shape {shape}; use the model_args of this model's training"
            )
        tensors[name] = tensor
    found.pop("lm_head.weight", None)  # tied; `_read_checkpoint` compared the head with the embedding
    ignored = [name for name in found if any(re.fullmatch(pattern, name) for pattern in _NANOGPT.ignored_tensors)]
    if extra := sorted(found.keys() - set(ignored)):
        raise CheckpointError(
            f"{path}: tensor {extra[0]} is not part of nanoGPT's model ({len(extra)} extra); "
            "give the ckpt.pt of an unmodified nanoGPT"
        )
    return tensors


def _write_tokenizer(source: Path, out: Path) -> tuple[str, ...]:
    """Copy a tokenizer's files to the directory `out`, a meta.pkl as tokenizer.json; return the names of new files.

    If only files that are not copied name the EOS tokens, a generation_config.json with their ids is added. Raises
    CheckpointError if the tokenizer is missing, damaged or cannot be copied.
    """
    if source.suffix == ".pkl":
        (out / "tokenizer.json").write_text(json.dumps(_tokenizer_json(_read_characters(source)), ensure_ascii=False))
        return ("tokenizer.json",)
    if not source.exists():
        raise CheckpointError(
            f"{source}: no such file or directory; give --tokenizer a meta.pkl or a tokenizer's files"
        )
    directory = source if source.is_dir() else source.parent
    names = [path.name for path in sorted(directory.glob("*.tiktoken"))] + list(_TOKENIZER_FILES)
    names = [name for name in names if (directory / name).is_file()] if source.is_dir() else [source.name]
    try:
        for name in names:
            shutil.copyfile(directory / name, out / name)
        if source.is_dir() and (ends := load_tokenizer(source).eos_token_ids) != load_tokenizer(out).eos_token_ids:
            # The EOS token comes from a file that was not copied, such as the config.json of another model.
            (out / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}) + "\n")
            names.append("generation_config.json")
    except OSError as error:
        raise CheckpointError(
            f"{source}: copying the tokenizer failed: {error}; give --tokenizer a readable copy"
        ) from error
    return tuple(names)


def _read_characters(path: Path) -> dict[str, int]:
    """Return the token id of each character, from the entry `stoi` of nanoGPT's meta.pkl. Raises CheckpointError.

    Rejected are tokens of several characters, and ids other than 0 to the number of characters - 1.
    """
    values = read_plain_pickle(path)
    ids = values.get("stoi") if isinstance(values, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise CheckpointError(f"{path}: no stoi, the id of each character; give the meta.pkl of this model's training")
    if not all(isinstance(character, str) and len(character) == 1 for character in ids):
        raise CheckpointError(f"{path}: stoi has tokens of more than one character; give --tokenizer a tokenizer.json")
    if sorted(ids.values()) != list(range(len(ids))):
        raise CheckpointError(
            f"{path}: the token ids in stoi are not 0 to {len(ids) - 1}; give the file that nanoGPT's prepare.py wrote"
        )
    return ids


def _tokenizer_json(ids: dict[str, int]) -> dict[str, Any]:
    """Return the content of a tokenizer.json with one token for each character of `ids` and errors for all others."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        # Every character, also a line break, is a separate piece.
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        # The unknown token is not in the vocabulary, so the library raises an error for an unknown character.
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unknown>"},
    }
