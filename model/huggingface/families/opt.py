"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions from row 2 on, layer norms, ReLU and biases.

Source of names and defaults: the classes `OPTConfig` and `OPTForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import PositionKind
from model.huggingface.families.gpt import ACTIVATIONS
from model.huggingface.families.reading.family import ModelFamily, concatenated, plain
from model.huggingface.families.reading.llama_like import layer_norm_fields
from model.huggingface.families.reading.reader import ConfigReader

# Flags with the only value that is implemented. Of the published checkpoints, only OPT-350M has another.
_FLAGS = {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}


def _read_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size("hidden_size", 768), reader.size("num_attention_heads", 12)
    for key, needed in _FLAGS.items():
        if (flag := reader.flag(key, needed)) is not needed:
            reader.note(key, flag, "not implemented; use a checkpoint with another value")
    if (inner := reader.optional_size("word_embed_proj_dim", None)) not in (None, width):
        reader.reject(
            "word_embed_proj_dim",
            inner,
            f"embeddings narrower than the hidden size {width}, as in OPT-350M, "
            "are not implemented; use another checkpoint",
        )
    reader.value("output_projection")  # in the file of OPT-13B, and read by nothing
    has_bias = reader.flag("enable_bias", True)
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 50272),
        max_context_length=reader.size("max_position_embeddings", 2048),
        num_layers=reader.num_layers("num_hidden_layers", 12),
        **layer_norm_fields(reader, width, heads),
        mlp_size=reader.size("ffn_dim", 3072),
        position=PositionKind.LEARNED,
        position_offset=2,
        rope_theta=10000.0,
        norm_eps=1e-5,
        mlp=reader.choice("activation_function", "relu", ACTIVATIONS),
        attention_bias=has_bias,
        mlp_bias=has_bias,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
    )


OPT = ModelFamily(
    model_type="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    read_config=_read_config,
    names={
        "token_embedding": plain("embed_tokens"),
        "position_embedding": plain("embed_positions"),
        "layers.#.attention_norm": plain("layers.#.self_attn_layer_norm"),
        "layers.#.attention.qkv": concatenated(
            "layers.#.self_attn.q_proj", "layers.#.self_attn.k_proj", "layers.#.self_attn.v_proj"
        ),
        "layers.#.attention.out": plain("layers.#.self_attn.out_proj"),
        "layers.#.mlp_norm": plain("layers.#.final_layer_norm"),
        "layers.#.mlp.up": plain("layers.#.fc1"),
        "layers.#.mlp.down": plain("layers.#.fc2"),
        "final_norm": plain("final_layer_norm"),
        "lm_head": plain("lm_head"),
    },
    prefix="model.decoder.",
    other_prefixes=("decoder.",),
    ignored_tensors=(),
)
