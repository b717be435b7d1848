"""Conversion of exports to GGUF, with a stub of the gguf package, which only the peer's environment has."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from loadtest.measurement import model_shapes
from model.checkpoint.conversion.export_hugging_face import export_checkpoint

# Heads that are not hidden size / number of heads, as Qwen3-0.6B's.
TINY = {
    "vocab_size": 300,
    "max_context_length": 128,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 32,
}


class Writer:
    """Stub of GGUFWriter that records fields and tensors by name."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.architecture = architecture
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, np.ndarray] = {}
        self.written: list[str] = []

    def add_tensor(self, name: str, array: np.ndarray, raw_dtype: str | None = None) -> None:
        """Record a tensor by name, as float32."""
        assert (raw_dtype, array.dtype) == ((None, np.float32) if array.ndim == 1 else ("BF16", np.uint16))
        assert array.flags.c_contiguous
        self.tensors[name] = array if raw_dtype is None else (array.astype(np.uint32) << 16).view(np.float32)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("add_"):
            return lambda value: self.fields.__setitem__(name.removeprefix("add_"), value)
        return lambda: self.written.append(name)


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Writer]:
    """Convert an export to GGUF and return the stub writer."""
    writers: list[Writer] = []

    def make(path: Path, architecture: str) -> Writer:
        writers.append(Writer(path, architecture))
        return writers[-1]

    gguf = ModuleType("gguf")
    gguf.__dict__.update(
        GGUFWriter=make,
        GGMLQuantizationType=SimpleNamespace(BF16="BF16"),
        LlamaFileType=SimpleNamespace(MOSTLY_BF16=32),
        TokenType=SimpleNamespace(CONTROL=3, NORMAL=1),
    )
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    monkeypatch.delitem(sys.modules, "loadtest.peers.drivers.llama_cpp_model", raising=False)
    module = importlib.import_module("loadtest.peers.drivers.llama_cpp_model")

    def run(exported: Path) -> Writer:
        monkeypatch.setattr(sys, "argv", ["llama_cpp_model", str(exported), str(exported / "out.gguf")])
        module.main()
        (writer,) = writers
        assert writer.written == ["write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"]
        return writer

    return run


def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, dtype: str = "bfloat16") -> Path:
    """Return the export of a tiny model with the architecture of a shape."""
    monkeypatch.setitem(model_shapes.SHAPE_SIZES, shape, TINY)
    ours = model_shapes.write_random_checkpoint(tmp_path / "ours", shape, dtype=dtype)
    export_checkpoint(ours, tmp_path / "exported")
    return tmp_path / "exported"


@pytest.mark.parametrize("shape", ["S", "qwen3-0.6b"])
def test_sizes_tensor_names_and_row_order_follow_llama_cpp(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    convert: Callable[[Path], Writer],
    shape: str,
) -> None:
    exported = export(tmp_path, monkeypatch, shape)
    writer = convert(exported)
    is_qwen3 = shape == "qwen3-0.6b"
    assert writer.architecture == ("qwen3" if is_qwen3 else "llama")
    sizes = ("key_length", "value_length", "rope_dimension_count", "head_count", "head_count_kv", "embedding_length")
    assert [writer.fields[name] for name in sizes] == [8, 8, 8, 4, 2, 16]
    assert (writer.fields["rope_freq_base"], writer.fields["layer_norm_rms_eps"]) == (
        (1e6, 1e-6) if is_qwen3 else (1e4, 1e-5)
    )
    stored = load_file(exported / "model.safetensors")
    assert len(writer.tensors) == len(stored)
    norms = {name for name in writer.tensors if name.endswith(("attn_q_norm.weight", "attn_k_norm.weight"))}
    assert len(norms) == (4 if is_qwen3 else 0)
    assert all(writer.tensors[name].shape == (8,) for name in norms)
    embedding = stored["model.embed_tokens.weight"]
    assert np.array_equal(writer.tensors["token_embd.weight"], embedding.float().numpy())
    for part, heads in (("q", 4), ("k", 2)):
        theirs = stored[f"model.layers.1.self_attn.{part}_proj.weight"].float().view(heads, 8, 16)
        pairs = theirs if is_qwen3 else theirs[:, [0, 4, 1, 5, 2, 6, 3, 7]]
        assert np.array_equal(writer.tensors[f"blk.1.attn_{part}.weight"], pairs.reshape(-1, 16).numpy())


def test_an_unsupported_model_type_exits_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Callable[[Path], Writer]
) -> None:
    exported = export(tmp_path, monkeypatch, "S")
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    with pytest.raises(SystemExit, match="model type 'gemma'; only llama, qwen3 are converted to GGUF"):
        convert(exported)


def test_other_dtypes_than_bfloat16_exit_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Callable[[Path], Writer]
) -> None:
    with pytest.raises(SystemExit, match="is F32; only BF16 is converted to GGUF"):
        convert(export(tmp_path, monkeypatch, "S", dtype="float32"))


def test_the_qwen3_shape_has_the_published_sizes() -> None:
    config = model_shapes.shape_config("qwen3-0.6b")
    assert config.num_parameters == 596_049_920  # https://huggingface.co/Qwen/Qwen3-0.6B, tied embeddings counted once
    assert (config.head_dim, config.qk_norm, config.rope_theta, config.norm_eps) == (128, True, 1e6, 1e-6)
