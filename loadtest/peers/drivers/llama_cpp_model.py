"""Converter of Kvasir's export to GGUF: `python -m loadtest.peers.drivers.llama_cpp_model DIR OUT.gguf [TYPE]`.

The file is written by llama.cpp's gguf package, because llama.cpp's converter rejects the tokenizer of the random
weights. TYPE is the type of the matrices: F32 (the default), F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1. A GGUF file
names its split pattern. The name of the most similar pattern is written, so numbers may become other tokens.
Source: convert_hf_to_gguf.py and llama_model_rope_type() of llama.cpp.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from model.gguf.block_types import dequantize
from model.gguf.tensor_types import TENSOR_TYPES
from model.io.safetensors_header import TensorHeader, read_headers

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # that the gguf package can write
_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}  # of Hugging Face, and of GGUF
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")  # number of an expert in a name of Hugging Face
# GGUF names of sizes, and their names in config.json. Without the lengths of keys and values, llama.cpp assumes a head
# size of hidden size / heads.
_SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "rope_dimension_count": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def main() -> None:
    """Convert an exported directory to a GGUF file. Exit with a one-line error for wrong arguments."""
    if len(sys.argv) not in (3, 4) or (sys.argv[3:] and sys.argv[3] not in _TYPES):
        sys.exit(f"give DIR, OUT.gguf and perhaps a type of {', '.join(_TYPES)}")
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    if not (source / "config.json").is_file():
        sys.exit(f"{source}: no config.json is in it; give the directory that `kvasir convert --export` has written")
    wanted = gguf.GGMLQuantizationType[sys.argv[3] if len(sys.argv) > 3 else "F32"]
    config = json.loads((source / "config.json").read_text())
    model_type = config["model_type"]
    if model_type not in _ARCHITECTURES:
        sys.exit(f"{source}: model type {model_type!r}; only {', '.join(_ARCHITECTURES)} are converted to GGUF")
    writer = gguf.GGUFWriter(out, _ARCHITECTURES[model_type])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for name, key in _SIZES.items():
        if key in config:
            getattr(writer, f"add_{name}")(config[key])
    _write_tokenizer(writer, *(json.loads((source / name).read_text()) for name in _TOKENIZER_FILES))
    if (template := source / "chat_template.jinja").is_file():
        writer.add_chat_template(template.read_text())
    if (defaults := source / "generation_config.json").is_file():
        values = json.loads(defaults.read_text())
        for name in ("temperature", "top_p", "min_p"):
            if name in values:
                writer.add_float32(f"general.sampling.{name.removesuffix('erature')}", values[name])
    # llama.cpp's "llama" rotates neighbouring pairs of a head's numbers, its "qwen3" and transformers the two halves.
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    reordered = heads if model_type == "llama" else {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_ARCHITECTURES[model_type].upper()], config["num_hidden_layers"])
    tensors: dict[str, dict[int, TensorHeader]] = {}  # by expert; a tensor without experts has one entry
    for path in sorted(source.glob("*.safetensors")):
        for name, header in read_headers(path).items():
            expert, their_name = _EXPERT.search(name), names.get_name(_EXPERT.sub("", name), (".weight",))
            assert their_name is not None, name
            tensors.setdefault(their_name, {})[int(expert[1]) if expert else 0] = header
    for name, headers in tensors.items():
        part = name.split(".")[-2]
        arrays = [_read(header) for _, header in sorted(headers.items())]
        array = np.stack(arrays) if part.endswith("_exps") else arrays[0]
        pairs = _as_pairs(array, reordered[part]) if part in reordered else array
        is_quantized = array.ndim > 1 and part != "ffn_gate_inp"
        fits = is_quantized and array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        kind = wanted if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(pairs, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"wrote {out}, {wanted.name}")


def _read(header: TensorHeader) -> np.ndarray:
    """Return a stored tensor in float32; NumPy has no bfloat16."""
    raw = np.fromfile(header.path, np.uint8, header.end - header.begin, offset=header.begin)
    kind = TENSOR_TYPES[header.dtype]
    return dequantize(kind, raw.reshape(-1, kind.bytes)).reshape(header.shape)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], settings: dict[str, Any]) -> None:
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if "(?i:" in json.dumps(tokenizer["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if name in special else normal for name in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(special.get(settings.get("eos_token"), max(special.values())))
    if (bos := settings.get("bos_token")) is not None:
        writer.add_bos_token_id(special[bos])
    writer.add_add_bos_token(bool(settings.get("add_bos_token")))


def _as_pairs(weight_FE: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, so that llama.cpp rotates neighbouring rows as a pair."""
    rows, inputs = weight_FE.shape
    halves = weight_FE.reshape(num_heads, 2, rows // num_heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, inputs))


if __name__ == "__main__":
    main()
