"""Unusable Hugging Face directories are rejected before loading, in one line with file, tensor and remedy."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.manifest import read_manifest
from model.huggingface.directory import INDEX_FILE, SINGLE_FILE
from model.io.files import CheckpointError
from tests.families.models import CASES
from tests.families.tokenizer_files import write_byte_level

Damage = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]
SHARD_1, SHARD_2 = "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three checkpoint directories: llama (untied) and gpt2 (tied) in one file, llama in shards."""
    root = tmp_path_factory.mktemp("checkpoints")
    CASES["llama mha"].build().save_pretrained(root / "llama")
    CASES["gpt2"].build().save_pretrained(root / "gpt2")
    CASES["llama mha"].build().save_pretrained(root / "shards", max_shard_size=60_000)
    for directory in root.iterdir():
        write_byte_level(directory, 300)
        read_manifest(directory).verify()
    assert (root / "shards" / SHARD_2).is_file()
    return root


def tensors(change: Callable[[Tensors], object], name: str = SINGLE_FILE) -> Damage:
    def damage(directory: Path) -> None:
        found = load_file(directory / name)
        change(found)
        save_file(found, directory / name)

    return damage


def put(name: str, tensor: torch.Tensor) -> Damage:
    return tensors(lambda found: found.update({name: tensor}))


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path) -> None:
        values = json.loads((directory / name).read_text())
        change(values)
        (directory / name).write_text(json.dumps(values))

    return damage


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    return in_json(INDEX_FILE, lambda values: change(values["weight_map"]))


def only(name: str, content: bytes = b"") -> Damage:
    def damage(directory: Path) -> None:
        (directory / SINGLE_FILE).unlink()
        (directory / name).write_bytes(content)

    return damage


def shorten(name: str, num_bytes: int) -> Damage:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:-num_bytes])


def declared(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return a function that changes the header of a directory's weight file and keeps the data."""

    def damage(directory: Path) -> None:
        data = (directory / SINGLE_FILE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (directory / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


def _pipe(name: str) -> Damage:
    """Return a function that replaces a file by a pipe without a writer, whose reading would block forever."""

    def damage(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return damage


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


Q, NORM, HEAD = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "tensor missing": (
        "llama",
        tensors(lambda t: t.pop(Q)),
        rf"llama: tensor {Q} is in no weight file \(1 missing\); copy all shards",
    ),
    "head missing": ("llama", tensors(lambda t: t.pop(HEAD)), "tensor lm_head.weight is in no weight file"),
    "tensor extra": ("llama", put("model.layers.9.x", torch.ones(1)), r"tensor model.layers.9.x is not part.*1 extra"),
    "bias extra": ("llama", put(Q.replace("weight", "bias"), torch.ones(32)), "q_proj.bias is not part of the model"),
    "tensor misshapen": (
        "llama",
        put(Q, torch.ones(32, 31)),
        r"model.safetensors: tensor model.layers.1.self_attn.q_proj.weight has shape \(32, 31\), but the config "
        r"requires \(32, 32\); use the config",
    ),
    "tensor transposed": ("gpt2", put("transformer.h.0.mlp.c_fc.weight", torch.ones(128, 32)), r"\(32, 128\)"),
    "tensor of integers": (
        "llama",
        put(NORM, torch.ones(32, dtype=torch.int64)),
        f"tensor {NORM} has dtype I64, not one of F32",
    ),
    "tensor of doubles": (
        "llama",
        put(NORM, torch.ones(32).double()),
        f"tensor {NORM} has dtype F64, not one of F32, BF16, F16",
    ),
    "quantized tensor": (
        "llama",
        put(NORM, torch.ones(32).to(torch.float8_e4m3fn)),
        f"tensor {NORM} has dtype F8_E4M3",
    ),
    "tensor with and without prefix": ("llama", put("norm.weight", torch.ones(32)), r"norm.weight is in model.safe"),
    "tied head that differs": (
        "gpt2",
        put("lm_head.weight", torch.ones(300, 32)),
        "tensor lm_head.weight differs from transformer.wte.weight, but tie_word_embeddings is true; if the head",
    ),
    "tied head of another dtype": ("gpt2", put("lm_head.weight", torch.ones(300, 32).half()), "lm_head.weight differs"),
    "bytes that are not the shape's": (
        "llama",
        declared(lambda header: header[NORM].update(shape=[32], dtype="F16")),
        "model.safetensors: not a valid safetensors file",
    ),
    "truncated file": ("llama", shorten(SINGLE_FILE, 10), "model.safetensors: not a valid safetensors file"),
    "truncated shard": ("shards", shorten(SHARD_2, 10), f"{SHARD_2}: not a valid safetensors file"),
    "empty shard": ("shards", lambda d: (d / SHARD_2).write_bytes(b""), f"{SHARD_2}: not a valid safetensors file"),
    "pointer of git-lfs": (
        "llama",
        lambda d: (d / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors: not a valid safetensors file",
    ),
    "weights that are a pipe": (
        "llama",
        _pipe(SINGLE_FILE),
        "model.safetensors: not a regular file; put the file itself",
    ),
    "weights that are a directory": ("llama", lambda d: _directory(d / SINGLE_FILE), "safetensors: not a regular file"),
    "shard that is a pipe": ("shards", _pipe(SHARD_2), f"{SHARD_2}: not a regular file"),
    "index that is a pipe": ("shards", _pipe(INDEX_FILE), f"{INDEX_FILE}: not a regular file"),
    "config that is a pipe": ("llama", _pipe("config.json"), "config.json: not a regular file"),
    "tensors that overlap": (
        "llama",
        declared(lambda header: header[Q].update(data_offsets=header[Q.replace("1", "0")]["data_offsets"])),
        "not a valid safetensors file",
    ),
    "a name of a million letters": (
        "llama",
        declared(lambda header: header.update({"x" * 10**6: header.pop(Q)})),
        "tensor xxx.*; use the config that the tensor was saved with",
    ),
    "nested header": ("llama", lambda d: _raw_header(d, b"[" * 100_000), "not a valid safetensors file"),
    "shard missing": ("shards", lambda d: (d / SHARD_2).unlink(), f"{SHARD_2}: missing, but listed in {INDEX_FILE}"),
    "shards of another model": (
        "shards",
        lambda d: shutil.copy(d / SHARD_1, d / SHARD_2),
        f"{SHARD_2}: tensor .* is in {SHARD_1} too",
    ),
    "index of another model": (
        "shards",
        index(lambda m: m.update({Q: "model-00004-of-00004.safetensors"})),
        f"model-00004-of-00004.safetensors: tensor {Q} is in model-0000.*, but the index file lists it in this file; "
        "download the index",
    ),
    "tensor that only the index knows": (
        "shards",
        index(lambda m: m.update(ghost=SHARD_1)),
        "tensor ghost is in no file, but the index file lists it in this file",
    ),
    "path upwards": ("shards", index(lambda m: m.update({Q: "../model.safetensors"})), "'../model.*' is not a plain"),
    "path from the root": ("shards", index(lambda m: m.update({Q: "/etc/x.safetensors"})), "is not a plain file name"),
    "path downwards": ("shards", index(lambda m: m.update({Q: "a/b.safetensors"})), "is not a plain file name"),
    "path of another system": ("shards", index(lambda m: m.update({Q: "..\\b.safetensors"})), "is not a plain file"),
    "shard that is a pickle": (
        "shards",
        index(lambda m: m.update({Q: "x.bin"})),
        "'x.bin', which is not a .safetensors",
    ),
    "index of numbers": ("shards", index(lambda m: m.update({Q: 3})), "in 3, which is not a .safetensors file"),
    "index without a map": ("shards", in_json(INDEX_FILE, lambda v: v.clear()), "index.json: no weight_map"),
    "index not JSON": ("shards", lambda d: (d / INDEX_FILE).write_text("{"), f"{INDEX_FILE}: not JSON"),
    "two sets of weights": (
        "shards",
        lambda d: shutil.copy(d / SHARD_1, d / SINGLE_FILE),
        "exists too; remove the outdated",
    ),
    "no weights": (
        "llama",
        lambda d: (d / SINGLE_FILE).unlink(),
        "neither model.safetensors nor model.safetensors.index",
    ),
    "pickle": (
        "llama",
        only("pytorch_model.bin", pickle.dumps({})),
        "pytorch_model.bin: pickles are not read, .* --pickle .*/llama --out",
    ),
    "nanoGPT's pickle": ("llama", only("ckpt.pt"), "ckpt.pt: .* `kvasir convert --nanogpt .*/ckpt.pt --tok"),
    "unknown architecture": (
        "llama",
        in_json("config.json", lambda v: v.update(model_type="mamba")),
        "config.json: model_type='mamba': not a supported family; `kvasir families` lists the supported ones",
    ),
    "activation": ("llama", in_json("config.json", lambda v: v.update(hidden_act="xielu")), "hidden_act='xielu': supp"),
    "rope type": (
        "llama",
        in_json("config.json", lambda v: v["rope_parameters"].update(rope_type="ntk")),
        "config.json: rope_parameters.rope_type='ntk': supported are default, linear, llama3, yarn, longrope",
    ),
    "no config": ("llama", lambda d: (d / "config.json").unlink(), "config.json: missing; it describes the model"),
    "config not JSON": ("llama", lambda d: (d / "config.json").write_text("{"), "config.json: not JSON"),
    "context beyond the positions": (
        "gpt2",
        in_json("config.json", lambda v: v.update(n_positions=128)),
        r"tensor transformer.wpe.weight has shape \(64, 32\), but the config requires \(128, 32\)",
    ),
    "fewer layers than tensors": (
        "llama",
        in_json("config.json", lambda v: v.update(num_hidden_layers=2)),
        r"tensor model.layers.2.* is not part of the model that the config describes \(9 extra\)",
    ),
    "ten thousand layers": (
        "llama",
        in_json("config.json", lambda v: v.update(num_hidden_layers=9_999)),
        "its config has 9999 layers, but its weight files have only 30 tensors; use the config",
    ),
    "tokenizer missing": ("llama", lambda d: (d / "tokenizer.json").unlink(), "llama: no tokenizer; expected one of"),
    "tokenizer damaged": ("llama", lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json: "),
    "tokenizer of another model": (
        "llama",
        lambda d: write_byte_level(d, 320),
        "tensor model.embed_tokens.weight has 300 rows, the tokenizer beside it 320 tokens, so some tokens have no",
    ),
}


def _raw_header(directory: Path, text: bytes) -> None:
    (directory / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize("name", DAMAGES)
def test_an_unusable_checkpoint_gives_one_error_line_before_loading(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    kind, damage, message = DAMAGES[name]
    directory = tmp_path / kind
    shutil.copytree(checkpoints / kind, directory)
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(directory).verify()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert str(directory) in str(caught.value)


HARMLESS: dict[str, tuple[str, Damage]] = {
    "rotary frequencies": ("llama", put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))),
    "masks": ("gpt2", put("transformer.h.0.attn.bias", torch.ones(1, 1, 64, 64, dtype=torch.bool))),
    "masked values": ("gpt2", put("transformer.h.2.attn.masked_bias", torch.tensor(-1e4))),
    "a tied head that was saved": (
        "gpt2",
        tensors(lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()})),
    ),
    "weights of another library beside them": ("llama", lambda d: (d / "consolidated.safetensors").write_bytes(b"x")),
    "an index of one file": (
        "llama",
        lambda d: (d / INDEX_FILE).write_text(json.dumps({"weight_map": {NORM: SINGLE_FILE}})),
    ),
    "pickles beside them": ("llama", lambda d: (d / "pytorch_model.bin").write_bytes(b"x")),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_extra_files_of_real_directories_are_ignored(checkpoints: Path, tmp_path: Path, name: str) -> None:
    kind, change = HARMLESS[name]
    shutil.copytree(checkpoints / kind, tmp_path / kind)
    before = read_manifest(tmp_path / kind).placements.keys()
    change(tmp_path / kind)
    manifest = read_manifest(tmp_path / kind)
    manifest.verify()
    assert manifest.placements.keys() == before


def test_the_model_name_is_that_of_the_directory_or_of_the_hub_cache(checkpoints: Path, tmp_path: Path) -> None:
    assert read_manifest(checkpoints / "llama").name == "llama"
    cached = tmp_path / "models--owner--my-model" / "snapshots" / "0123abc"
    cached.mkdir(parents=True)
    for path in (checkpoints / "llama").iterdir():  # the hub's cache holds links to the files
        (cached / path.name).symlink_to(path)
    manifest = read_manifest(cached)
    manifest.verify()
    assert manifest.name == "my-model"
    assert manifest.num_weight_bytes == (cached / SINGLE_FILE).stat().st_size
