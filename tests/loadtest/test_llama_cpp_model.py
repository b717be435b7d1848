"""Conversion of exports to GGUF files, which llama.cpp's gguf package reads again."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from loadtest.measurement import model_shapes
from loadtest.peers.drivers import llama_cpp_model
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


def convert(exported: Path, monkeypatch: pytest.MonkeyPatch, *types: str) -> gguf.GGUFReader:
    """Convert an export to GGUF, and open the file."""
    out = exported / "out.gguf"
    monkeypatch.setattr(sys, "argv", ["llama_cpp_model", str(exported), str(out), *types])
    llama_cpp_model.main()
    return gguf.GGUFReader(out)


def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, dtype: str = "bfloat16") -> Path:
    """Return the export of a tiny model with the architecture of a shape."""
    monkeypatch.setitem(model_shapes.SHAPE_SIZES, shape, TINY)
    ours = model_shapes.write_random_checkpoint(tmp_path / "ours", shape, dtype=dtype)
    export_checkpoint(ours, tmp_path / "exported")
    return tmp_path / "exported"


@pytest.mark.parametrize("shape", ["S", "qwen3-0.6b"])
def test_sizes_tensor_names_and_row_order_follow_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    exported = export(tmp_path, monkeypatch, shape)
    reader = convert(exported, monkeypatch, "BF16")
    is_qwen3 = shape == "qwen3-0.6b"
    name = "qwen3" if is_qwen3 else "llama"
    fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == name
    sizes = [f"attention.{size}" for size in ("key_length", "value_length", "head_count", "head_count_kv")]
    sizes += ["rope.dimension_count", "embedding_length"]
    assert [fields[f"{name}.{size}"] for size in sizes] == [8, 8, 4, 2, 8, 16]
    numbers = [fields[f"{name}.{key}"] for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon")]
    assert numbers == pytest.approx([1e6, 1e-6] if is_qwen3 else [1e4, 1e-5])
    tensors = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    kinds = {each.tensor_type.name for each in reader.tensors if each.data.ndim > 1}
    stored = load_file(exported / "model.safetensors")
    assert (len(tensors), kinds) == (len(stored), {"BF16"})
    norms = {key for key in tensors if key.endswith(("attn_q_norm.weight", "attn_k_norm.weight"))}
    assert len(norms) == (4 if is_qwen3 else 0)
    assert all(tensors[key].shape == (8,) for key in norms)
    embedding = stored["model.embed_tokens.weight"]
    assert np.array_equal(tensors["token_embd.weight"], embedding.float().numpy())
    for part, heads in (("q", 4), ("k", 2)):
        theirs = stored[f"model.layers.1.self_attn.{part}_proj.weight"].float().view(heads, 8, 16)
        pairs = theirs if is_qwen3 else theirs[:, [0, 4, 1, 5, 2, 6, 3, 7]]
        assert np.array_equal(tensors[f"blk.1.attn_{part}.weight"], pairs.reshape(-1, 16).numpy())


def test_an_unsupported_model_type_exits_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(tmp_path, monkeypatch, "S")
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    with pytest.raises(SystemExit, match="model type 'gemma'; only llama, qwen3, qwen3_moe are converted to GGUF"):
        convert(exported, monkeypatch)


def test_a_wrong_argument_exits_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"no config\.json is in it; give the directory that"):
        convert(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match=r"give DIR, OUT\.gguf and perhaps a type of F32"):
        convert(tmp_path, monkeypatch, "Q4_K")


def test_the_begin_of_text_token_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(tmp_path, monkeypatch, "S")
    path = exported / "tokenizer_config.json"
    (token, *_) = json.loads((exported / "tokenizer.json").read_text())["added_tokens"]
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "bos_token": token["content"], "add_bos_token": True}))
    fields = convert(exported, monkeypatch).fields
    names = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token")
    assert [fields[name].contents() for name in names] == [token["id"], True]


def test_the_qwen3_shape_has_the_published_sizes() -> None:
    config = model_shapes.shape_config("qwen3-0.6b")
    assert config.num_parameters == 596_049_920  # https://huggingface.co/Qwen/Qwen3-0.6B, tied embeddings counted once
    assert (config.head_dim, config.qk_norm, config.rope_theta, config.norm_eps) == (128, True, 1e6, 1e-6)
