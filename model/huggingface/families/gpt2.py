"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, and weights stored as (in, out).

Source of names and defaults: `GPT2Config`, `GPT2LMHeadModel` and `Conv1D` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.huggingface.families.family import Layout, ModelFamily, Names, plain
from model.huggingface.families.llama_like import size_of_heads
from model.huggingface.families.reader import ConfigReader

ACTIVATIONS = {
    "gelu_new": MlpKind.GELU,
    "gelu_pytorch_tanh": MlpKind.GELU,
    "gelu_fast": MlpKind.GELU,
    "gelu": MlpKind.GELU_EXACT,
    "gelu_python": MlpKind.GELU_EXACT,
    "relu": MlpKind.RELU,
}


def _read_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size("n_embd", 768), reader.size("n_head", 12)
    positions = reader.size("n_positions", 1024)
    if (context := reader.take("n_ctx")) not in (None, positions):
        reader.refuse("n_ctx", context, f"n_ctx must equal n_positions, {positions}; correct the config")
    inner = reader.optional_size("n_inner", None)
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 50257),
        max_context_length=positions,
        num_layers=reader.layers("n_layer", 12),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size_of_heads(reader, width, heads),
        mlp_size=4 * width if inner is None else inner,
        position=PositionKind.LEARNED,
        rope_theta=10000.0,
        norm=NormKind.LAYER_NORM,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        mlp=reader.choice("activation_function", "gelu_new", ACTIVATIONS),
        attention_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        score_scale=None if reader.flag("scale_attn_weights", True) else 1.0,
    )


def _transposed(module: str) -> Names:
    return Names((module,), Layout.TRANSPOSED)


GPT2 = ModelFamily(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    read_config=_read_config,
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
