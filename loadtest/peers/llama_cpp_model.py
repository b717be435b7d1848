"""Our export as a GGUF file: `python -m loadtest.peers.llama_cpp_model HUGGING_FACE_DIR OUT.gguf`.

Written by llama.cpp's own gguf package, float32. Its own converter knows no tokenizer that it has not met before, and
that of random weights is such a one. Rows of queries and keys are reordered as that converter does: llama.cpp turns
neighbouring pairs of a head's numbers, transformers its two halves.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    """Read the export, write the file."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    _write_sizes(writer, config)
    _write_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            ours, array = _name(name), tensor.astype(np.float32)
            for part, count in heads.items():
                if ours.endswith(f"{part}.weight"):
                    array = _as_pairs(array, count)
            writer.add_tensor(ours, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    ids = dict(tokenizer["model"]["vocab"])
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    names = {number: name for name, number in (ids | special).items()}
    tokens = [names[number] for number in range(len(names))]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if name in special else normal for name in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(max(special.values()))
    writer.add_add_bos_token(False)


def _name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers'."""
    parts = name.removeprefix("model.").removesuffix(".weight")
    if parts in ("embed_tokens", "norm", "lm_head"):
        return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts] + ".weight"
    _, layer, inner = parts.split(".", 2)
    return f"blk.{layer}.{_NAMES[inner]}.weight"


def _as_pairs(weight_FE: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head so that what were its halves are neighbours."""
    rows, inputs = weight_FE.shape
    halves = weight_FE.reshape(num_heads, 2, rows // num_heads // 2, inputs)
    return halves.swapaxes(1, 2).reshape(rows, inputs)


if __name__ == "__main__":
    main()
