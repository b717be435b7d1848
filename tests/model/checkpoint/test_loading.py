"""Checkpoints: loading returns exactly what was saved, and a damaged checkpoint gives a one-line error."""

import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import EMBEDDING, MATRICES, load_model, save_checkpoint
from model.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from model.checkpoint.weights import plan_shards, write_shards
from model.io.files import CheckpointError
from model.io.safetensors_header import read_headers
from model.native.native_transformer import NativeTransformer
from model.nn.linear import LINEAR_KINDS, StackedLinear, replace_linears
from model.tokenizer.byte_level import RANKS_FILE, save_native
from model.training.data.bpe import train_bpe
from tests.families.models import CASES
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of

CONFIG = VARIANTS["gpt2"]
AESOP = (Path(__file__).parents[2] / "data" / "aesop.txt").read_text()
SHARD = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_checkpoint(
        tmp_path / "model",
        config=CONFIG,
        tensors=dict(build(CONFIG).state_dict()),
        tokenizer=train_bpe(["a b c"], 260),
        name="test",
        training={"seed": 1},
    )
    return tmp_path / "model"


def test_headers_of_the_weight_files_are_read_once_for_all_processes(directory: Path) -> None:
    manifest = read_manifest(directory)
    manifest.verify()
    placements = manifest.placements
    (directory / SHARD).unlink()
    assert pickle.loads(pickle.dumps(manifest)).placements == placements
    with pytest.raises(CheckpointError, match=SHARD):
        dict(dataclasses.replace(manifest).placements)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_and_loaded_model_computes_the_same_logits(tmp_path: Path, variant: str) -> None:
    model = build(VARIANTS[variant])
    save_checkpoint(
        tmp_path,
        config=model.config,
        tensors=dict(model.state_dict()),
        tokenizer=train_bpe(["a b c"], 260),
        name="test",
        training={},
    )
    manifest = read_manifest(tmp_path)
    manifest.verify()
    assert manifest.config == model.config
    loaded = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    ids, metadata = torch.arange(9), AttentionMetadata.uncached((9,))
    assert torch.equal(loaded(ids, metadata, None), model(ids, metadata, None))


def test_bfloat16_files_load_in_either_dtype(directory: Path) -> None:
    model = build(CONFIG)
    manifest = read_manifest(directory)
    save_checkpoint(
        directory,
        config=CONFIG,
        tensors=dict(model.state_dict()),
        tokenizer=train_bpe(["a b c"], 260),
        name="test",
        training={},
        dtype=torch.bfloat16,
    )
    manifest = read_manifest(directory)
    manifest.verify()
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(manifest, device="cpu", dtype=dtype, attention=ATTENTION_BACKENDS["sdpa"])
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name].bfloat16().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_that_are_packed_next_are_mapped_from_their_files(directory: Path, dtype: torch.dtype) -> None:
    shared: dict[str, Any] = {"device": "cpu", "dtype": dtype, "attention": ATTENTION_BACKENDS["sdpa"]}
    copied = load_model(read_manifest(directory), **shared).state_dict()
    mapped = load_model(read_manifest(directory), packed_next=(*MATRICES, EMBEDDING), **shared).state_dict()
    assert all(torch.equal(tensor, copied[name]) for name, tensor in mapped.items())
    header = read_headers(directory / SHARD)["layers.0.attention.out.weight"]
    with (directory / SHARD).open("r+b") as file:
        file.seek(header.begin)
        file.write(bytes(header.end - header.begin))
    is_zero = {name: not tensor.any() for name, tensor in mapped.items() if name.endswith("attention.out.weight")}
    assert is_zero["layers.0.attention.out.weight"] == (dtype is torch.float32), (
        "a matrix stored in another dtype is copied"
    )
    assert copied["layers.0.attention.out.weight"].any()
    mapped["layers.0.mlp.down.weight"].zero_()
    again = load_model(read_manifest(directory), **shared).state_dict()
    assert torch.equal(again["layers.0.mlp.down.weight"], copied["layers.0.mlp.down.weight"]), "the file is unchanged"


@pytest.mark.parametrize("kind", ["native", *LINEAR_KINDS])
def test_matrices_stored_in_parts_are_mapped_and_packed_without_a_copy(tmp_path: Path, kind: str) -> None:
    """Hugging Face stores the matrices of queries, keys, values, gates and ups one by one, with a bias for each."""
    CASES["qwen2"].build().save_pretrained(tmp_path)
    shared: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "attention": ATTENTION_BACKENDS["sdpa"]}
    copied = load_model(read_manifest(tmp_path), **shared)
    mapped = load_model(read_manifest(tmp_path), packed_next=(*MATRICES, EMBEDDING), **shared)
    stacked = {name: module for name, module in mapped.named_modules() if isinstance(module, StackedLinear)}
    assert {name.rpartition(".")[2] for name in stacked} == {"qkv", "gate_up"}
    for name, module in stacked.items():
        assert torch.equal(module.weight, copied.get_parameter(f"{name}.weight"))
    ids, metadata = torch.arange(9), AttentionMetadata.uncached((9,))
    models: list[Any] = [copied, mapped]
    if kind == "native":
        (library, *_) = map(library_of, BUILDABLE)
        models = [NativeTransformer(model, library) for model in models]
    else:
        for model in models:
            replace_linears(model, kind)
    theirs, ours = (model(ids, metadata, None) for model in models)
    assert torch.equal(ours, theirs)


def save(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(build(CONFIG).state_dict())
    tokenizer = train_bpe(["a b c"], 260)
    save_checkpoint(directory, config=CONFIG, tensors=tensors, tokenizer=tokenizer, name="test", training={})
    return tensors


def test_a_save_leaves_one_file_or_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save replaces the files of the previous save."""
    save(tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("model*"))] == ["model.safetensors"]
    with monkeypatch.context() as smaller:
        smaller.setattr("model.checkpoint.weights.MAX_SHARD_BYTES", 20_000)
        tensors = save(tmp_path)
    manifest = read_manifest(tmp_path)
    manifest.verify()
    files = manifest.weight_files
    assert len(files) > 2
    count = len(files)
    assert [path.name for path in files] == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert sorted(tmp_path.glob("*.safetensors")) == files
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert index["weight_map"] == {name: path.name for path in files for name in read_headers(path)}
    assert index["weight_map"].keys() == tensors.keys()
    assert "model.safetensors.index.json" in manifest.files
    single = max(tensor.nbytes for tensor in tensors.values())
    assert all(path.stat().st_size < max(20_000, single) + 4_000 for path in files)
    save(tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("model*"))] == ["model.safetensors"]
    read_manifest(tmp_path).verify()


def test_shards_hold_up_to_5_gigabytes() -> None:
    """The sizes are passed without tensors. 310 matrices of 8 MB fit in one file, and so do exactly 5 GB."""
    assert len(plan_shards({str(n): 8_000_000 for n in range(310)})) == 1
    assert len(plan_shards({str(n): 1_000_000_000 for n in range(5)})) == 1
    sizes = {"a": 3_000_000_000, "b": 2_000_000_001, "c": 9_000_000_000, "d": 1}
    assert plan_shards(sizes) == [["a"], ["b"], ["c"], ["d"]]


def test_a_shard_is_written_before_the_next_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So at most one shard of converted tensors is in memory."""
    monkeypatch.setattr("model.checkpoint.weights.MAX_SHARD_BYTES", 8)
    num_written: list[int] = []

    def tensors() -> Iterator[torch.Tensor]:
        for _ in range(5):
            num_written.append(len(list(tmp_path.glob("*.safetensors"))))
            yield torch.zeros(1)

    write_shards(tmp_path, dict.fromkeys("abcde", 4), tensors())
    assert num_written == [0, 0, 1, 1, 2]


def _truncate(directory: Path) -> None:
    data = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(data[:-10])


def _flip_a_bit(directory: Path) -> None:
    data = bytearray((directory / SHARD).read_bytes())
    data[-1] ^= 1
    (directory / SHARD).write_bytes(data)


def _rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Return a function that changes a checkpoint's tensors and updates the hashes, as a careless tool would."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / SHARD)
        change(tensors)
        save_file(tensors, directory / SHARD)
        write_manifest(directory, name="test", training={})

    return damage


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["final_norm.weight"] = torch.zeros(3)


def _manifest(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        values = json.loads((directory / MANIFEST_FILE).read_text())
        change(values)
        (directory / MANIFEST_FILE).write_text(json.dumps(values))

    return damage


def _larger_tokenizer(directory: Path) -> None:
    words = " ".join(f"{word} {word}" for word in AESOP.split()[:2000])
    save_native(train_bpe([words], 400), directory)
    write_manifest(directory, name="test", training={})


def _config(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text(text)

    return write


def _pipe(name: str) -> Callable[[Path], None]:
    """Return a function that replaces a file by a FIFO without a writer: reading the FIFO would block forever."""

    def damage(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda d: (d / SHARD).unlink(), f"{SHARD}: missing"),
    "shard truncated": (_truncate, f"{SHARD}: .* bytes, .* expected"),
    "bit flipped": (_flip_a_bit, f"{SHARD}: SHA-256 differs"),
    "tokenizer missing": (lambda d: (d / RANKS_FILE).unlink(), f"{RANKS_FILE}: missing"),
    "tensor missing": (_rewrite(lambda t: t.__delitem__("final_norm.bias")), "final_norm.bias is in no weight file"),
    "tensor extra": (_rewrite(lambda t: t.update(extra=torch.zeros(1))), "tensor extra is not part"),
    "tensor misshapen": (_rewrite(_wrong_shape), r"final_norm.weight has shape \(3,\)"),
    "tensor of integers": (
        _rewrite(lambda t: t.update({"final_norm.weight": torch.zeros(32, dtype=torch.int64)})),
        "final_norm.weight has dtype I64",
    ),
    "not safetensors": (lambda d: (d / SHARD).write_bytes(b"PK" * 20), f"{SHARD}: .* bytes, .* expected"),
    "tokenizer of another model": (
        _larger_tokenizer,
        "token_embedding.weight has 300 rows, the tokenizer beside it 400 tokens",
    ),
    "config nested too deeply": (_config("[" * 100_000), "config.json: not JSON"),
    "config with a number beyond all bounds": (
        lambda d: _config((d / "config.json").read_text().replace("1e-05", "1" + "0" * 400))(d),
        "config.json: ",
    ),
    "a name with a line break": (_manifest(lambda v: v.update(name="a\nb")), "cannot be shown"),
    "a null name": (_manifest(lambda v: v.update(name=None)), "the model's name None cannot be shown; give"),
    "a name of a million letters": (_manifest(lambda v: v.update(name="x" * 10**6)), "1 to 255 printable characters"),
    "a format of many letters": (_manifest(lambda v: v.update(format="x" * 10**5)), "not 'kvasir-checkpoint-1'"),
    "a size of many digits": (
        _manifest(lambda v: v["files"]["config.json"].update(bytes=10**4000)),  # type: ignore[index]
        "config.json: .* the copy is incomplete, copy the file again",
    ),
    "a key of lines": (_config('{"a\\nb": 1}'), "config.json: unknown model config keys: a\ufffdb"),
    "a key of many letters": (_config(json.dumps({"x" * 10**5: 1})), "config.json: unknown model config keys: xxx"),
    "manifest that is a pipe": (
        _pipe(MANIFEST_FILE),
        f"{MANIFEST_FILE}: not a regular file; put the file itself there",
    ),
    "config that is a pipe": (_pipe("config.json"), "config.json: not a regular file"),
    "shard that is a pipe": (_pipe(SHARD), f"{SHARD}: not a regular file"),
    "config not JSON": (_config("{"), "config.json: not JSON"),
    "config unknown key": (_config('{"colour": 1}'), "config.json: unknown model config keys: colour"),
    "manifest missing": (lambda d: (d / MANIFEST_FILE).unlink(), f"{MANIFEST_FILE}: missing; copy"),
    "manifest of another format": (_manifest(lambda v: v.update(format="x")), "its format is 'x'"),
    "manifest without files": (_manifest(lambda v: v.pop("files")), "malformed"),
    "path trick": (
        _manifest(lambda v: v.update(files={"../x.safetensors": {"bytes": 1, "sha256": ""}})),
        "is not a plain file name",
    ),
    "config unlisted": (_manifest(lambda v: v["files"].pop("config.json")), "its list of files lacks config.json"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_gives_one_error_line(directory: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(directory).verify()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_saved_weights_are_readable_by_other_users(directory: Path) -> None:
    assert (directory / SHARD).stat().st_mode & 0o777 == 0o644


def test_a_missing_checkpoint_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        read_manifest(tmp_path / "nothing")


def test_files_in_other_formats_are_rejected_by_their_header(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"12345678", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"{}" + b"extra"]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a valid safetensors file"):
            read_headers(path)


def test_saving_tensors_of_another_config_is_rejected(directory: Path) -> None:
    with pytest.raises(ValueError, match="do not match the model config"):
        save_checkpoint(directory, config=CONFIG, tensors={}, tokenizer=train_bpe(["a"], 260), name="x", training={})
    with pytest.raises(ValueError, match="the tokenizer has"):
        save_checkpoint(
            directory,
            config=CONFIG,
            tensors=dict(build(CONFIG).state_dict()),
            tokenizer=train_bpe(["abcdefghij " * 9, " ".join(f"word{n} word{n}" for n in range(999))], 400),
            name="x",
            training={},
        )
