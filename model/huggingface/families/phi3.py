"""Phi-3 (arXiv 2404.14219) and Phi-4-mini (arXiv 2503.01743): Llama's layers with fused matrices and LongRoPE."""

from functools import partial

from model.huggingface.families.reading.family import plain
from model.huggingface.families.reading.llama_like import derived_family, read_one_rope, read_sliding_window

PHI3 = derived_family(
    "phi3",
    "Phi3",
    read_sliding_window,
    renamed={
        "layers.#.attention.qkv": plain("layers.#.self_attn.qkv_proj"),
        "layers.#.mlp.gate_up": plain("layers.#.mlp.gate_up_proj"),
    },
    # The first checkpoints call LongRoPE "su" or "yarn".
    read_ropes=partial(
        read_one_rope, partial_names=("partial_rotary_factor",), original=4096, longrope_names=("su", "yarn")
    ),
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
