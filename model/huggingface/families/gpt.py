"""GPT-2, and GPT-NeoX with Pythia.

GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, and weights stored as (in, out).
GPT-NeoX (arXiv 2204.06745), Pythia (arXiv 2304.01373): parallel attention and MLP, partial rotary embedding, and one
matrix with q, k and v of head 0, then q, k and v of head 1, and so on.
Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import MlpKind, PositionKind
from model.huggingface.families.reading.family import Layout, ModelFamily, Names, plain
from model.huggingface.families.reading.llama_like import layer_norm_fields
from model.huggingface.families.reading.reader import ConfigReader, read_rope

ACTIVATIONS = {
    "gelu_new": MlpKind.GELU,
    "gelu_pytorch_tanh": MlpKind.GELU,
    "gelu_fast": MlpKind.GELU,
    "gelu": MlpKind.GELU_EXACT,
    "gelu_python": MlpKind.GELU_EXACT,
    "relu": MlpKind.RELU,
}


def _read_gpt2_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size("n_embd", 768), reader.size("n_head", 12)
    positions = reader.size("n_positions", 1024)
    if (context := reader.value("n_ctx")) not in (None, positions):
        reader.reject("n_ctx", context, f"n_ctx must equal n_positions, {positions}; correct the config")
    inner = reader.optional_size("n_inner", None)
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 50257),
        max_context_length=positions,
        num_layers=reader.num_layers("n_layer", 12),
        **layer_norm_fields(reader, width, heads),
        mlp_size=4 * width if inner is None else inner,
        position=PositionKind.LEARNED,
        rope_theta=10000.0,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        mlp=reader.choice("activation_function", "gelu_new", ACTIVATIONS),
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        score_scale=None if reader.flag("scale_attn_weights", True) else 1.0,
    )


def _transposed(module: str) -> Names:
    return Names((module,), Layout.TRANSPOSED)


GPT2 = ModelFamily(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    read_config=_read_gpt2_config,
    names={
        "token_embedding": plain("wte"),
        "position_embedding": plain("wpe"),
        "layers.#.attention_norm": plain("h.#.ln_1"),
        "layers.#.attention.qkv": _transposed("h.#.attn.c_attn"),
        "layers.#.attention.out": _transposed("h.#.attn.c_proj"),
        "layers.#.mlp_norm": plain("h.#.ln_2"),
        "layers.#.mlp.up": _transposed("h.#.mlp.c_fc"),
        "layers.#.mlp.down": _transposed("h.#.mlp.c_proj"),
        "final_norm": plain("ln_f"),
        "lm_head": plain("lm_head"),
    },
    prefix="transformer.",
    ignored_tensors=(r"h\.\d+\.attn\.(masked_)?bias",),
)


def _read_neox_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size("hidden_size", 6144), reader.size("num_attention_heads", 64)
    fields = layer_norm_fields(reader, width, heads)
    positions = reader.size("max_position_embeddings", 2048)
    rope = read_rope(
        reader,
        max_positions=positions,
        theta_names=("rotary_emb_base",),
        partial_names=("rotary_pct",),
        partial=0.25,
    )
    # For this family, transformers ignores these two top-level keys, but its older versions wrote them.
    reader.check_ignored("rope_theta", rope.theta, "rotary_emb_base")
    reader.check_ignored("partial_rotary_factor", rope.partial, "rotary_pct")
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 50432),
        max_context_length=positions,
        num_layers=reader.num_layers("num_hidden_layers", 44),
        **fields,
        mlp_size=reader.size("intermediate_size", 24576),
        position=PositionKind.ROTARY,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rope.dim(fields["head_dim"]),
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        mlp=reader.choice("hidden_act", "gelu", ACTIVATIONS),
        attention_bias=reader.flag("attention_bias", True),
        mlp_bias=True,
        tie_embeddings=reader.flag("tie_word_embeddings", False),
        parallel_residual=reader.flag("use_parallel_residual", True),
    )


GPT_NEOX = ModelFamily(
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    read_config=_read_neox_config,
    names={
        "token_embedding": plain("embed_in"),
        "layers.#.attention_norm": plain("layers.#.input_layernorm"),
        "layers.#.attention.qkv": Names(("layers.#.attention.query_key_value",), Layout.INTERLEAVED_HEADS),
        "layers.#.attention.out": plain("layers.#.attention.dense"),
        "layers.#.mlp_norm": plain("layers.#.post_attention_layernorm"),
        "layers.#.mlp.up": plain("layers.#.mlp.dense_h_to_4h"),
        "layers.#.mlp.down": plain("layers.#.mlp.dense_4h_to_h"),
        "final_norm": plain("final_layer_norm"),
        "lm_head": plain("embed_out"),
    },
    prefix="gpt_neox.",
    aliases={"lm_head.weight": "embed_out.weight"},
    ignored_tensors=(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)
