"""Bloom (BigScience 2022, arXiv 2211.05100): ALiBi, a norm of the embedding, and q, k and v interleaved by head.

Source of names and defaults: the classes `BloomConfig` and `BloomForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import MlpKind, PositionKind
from model.huggingface.families.reading.family import Layout, ModelFamily, Names, plain
from model.huggingface.families.reading.llama_like import layer_norm_fields
from model.huggingface.families.reading.reader import ConfigReader

# Keys of the training code. `slow_but_exact` adds parts of a matrix product in another order.
_UNUSED_KEYS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
)


def _read_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size_of(("hidden_size", "n_embed"), 64), reader.size_of(("n_head", "num_attention_heads"), 8)
    reader.check_off("apply_residual_connection_post_layernorm", "not implemented; use a checkpoint without it")
    if (inner := reader.optional_size("n_inner", None)) not in (None, 4 * width):
        reader.reject("n_inner", inner, f"this family has {4 * width}, 4 times the hidden size; correct the config")
    for key in _UNUSED_KEYS:
        reader.value(key)
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 250880),
        max_context_length=reader.size("seq_length", 2048),  # of the training; ALiBi itself has no limit
        num_layers=reader.num_layers("n_layer", 2),
        **layer_norm_fields(reader, width, heads),
        mlp_size=4 * width,
        position=PositionKind.ALIBI,
        rope_theta=10000.0,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        mlp=MlpKind.GELU,
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        embedding_norm=True,
    )


BLOOM = ModelFamily(
    model_type="bloom",
    architectures=("BloomForCausalLM", "BloomModel"),
    read_config=_read_config,
    names={
        "token_embedding": plain("word_embeddings"),
        "embedding_norm": plain("word_embeddings_layernorm"),
        "layers.#.attention_norm": plain("h.#.input_layernorm"),
        "layers.#.attention.qkv": Names(("h.#.self_attention.query_key_value",), Layout.INTERLEAVED_HEADS),
        "layers.#.attention.out": plain("h.#.self_attention.dense"),
        "layers.#.mlp_norm": plain("h.#.post_attention_layernorm"),
        "layers.#.mlp.up": plain("h.#.mlp.dense_h_to_4h"),
        "layers.#.mlp.down": plain("h.#.mlp.dense_4h_to_h"),
        "final_norm": plain("ln_f"),
        "lm_head": plain("lm_head"),
    },
    prefix="transformer.",
    ignored_tensors=(),
)
