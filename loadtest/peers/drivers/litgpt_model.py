"""Converter of Kvasir's export to litgpt's files: `python -m loadtest.peers.drivers.litgpt_model HUGGING_FACE_DIR OUT`.

The tensors pass through litgpt's conversion of Llama. Its table of known models is bypassed by a configuration made
from config.json.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import save_config
from safetensors.torch import load_file


def main() -> None:
    """Read the export, write lit_model.pth and the files beside it."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    config = _config(json.loads((source / "config.json").read_text()))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    converted: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, converted, tensors)
    save_config(config, out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    torch.save(converted, out / "lit_model.pth")


def _config(values: dict[str, Any]) -> Config:
    return Config(
        name="shape",
        block_size=values["max_position_embeddings"],
        vocab_size=values["vocab_size"],
        padded_vocab_size=values["vocab_size"],
        n_layer=values["num_hidden_layers"],
        n_head=values["num_attention_heads"],
        n_query_groups=values["num_key_value_heads"],
        n_embd=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        rotary_percentage=1.0,
        rope_base=int(values["rope_parameters"]["rope_theta"]),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=values["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )


if __name__ == "__main__":
    main()
