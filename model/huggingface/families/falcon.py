"""Falcon 7B (arXiv 2311.16867): rotary positions, multi-query attention, and parallel layers with a single norm.

Variants have multi-head attention, sequential layers and biases.
Source of names and defaults: the classes `FalconConfig` and `FalconForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import NormKind, PositionKind
from model.huggingface.families.bloom import BLOOM
from model.huggingface.families.gpt import ACTIVATIONS
from model.huggingface.families.reading.family import ModelFamily
from model.huggingface.families.reading.llama_like import read_one_rope, size_of_heads
from model.huggingface.families.reading.reader import ConfigReader


def _read_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size_of(("hidden_size", "n_embed"), 4544), reader.size("num_attention_heads", 71)
    head_dim, positions = size_of_heads(reader, width, heads), reader.size("max_position_embeddings", 2048)
    _reject_other_layers(reader)
    kv_heads = reader.optional_size("num_kv_heads", None)
    is_multi_query = reader.flag("multi_query", True)
    if not is_multi_query and kv_heads not in (None, heads):
        reader.reject("num_kv_heads", kv_heads, f"must be {heads}, the heads, without multi_query; correct the config")
    inner = reader.optional_size("ffn_hidden_size", None)
    is_parallel, has_bias = reader.flag("parallel_attn", True), reader.flag("bias", False)
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 65024),
        max_context_length=positions,
        num_layers=reader.num_layers("num_hidden_layers", 32),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=1 if is_multi_query else heads,
        head_dim=head_dim,
        mlp_size=4 * width if inner is None else inner,
        position=PositionKind.ROTARY,
        **read_one_rope(reader, positions, head_dim),
        norm=NormKind.LAYER_NORM,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        mlp=reader.choice("activation", "gelu", ACTIVATIONS),
        attention_bias=has_bias,
        mlp_bias=has_bias,
        qk_norm=False,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        parallel_residual=is_parallel,
        shares_norm=is_parallel,
    )


def _reject_other_layers(reader: ConfigReader) -> None:
    """Reject, by `reader.note`, layers as in Falcon 40B, 180B and Falcon 2 11B, and positions as in Falcon RW.

    Layers with a residual after the norm are rejected too. Falcon 40B has k and v between groups of q. Falcon RW's
    ALiBi biases are rounded to bfloat16 at each key's position, so the bias of a distance depends on the position.
    """
    for key in ("new_decoder_architecture", "alibi", "apply_residual_connection_post_layernorm"):
        reader.check_off(key, "not implemented; use a checkpoint without it, such as Falcon 7B")
    if (norms := reader.optional_size("num_ln_in_parallel_attn", None)) not in (None, 1):
        reader.note("num_ln_in_parallel_attn", norms, "not implemented; use a checkpoint without it, such as Falcon 7B")


FALCON = ModelFamily(
    model_type="falcon",
    architectures=("FalconForCausalLM", "FalconModel"),
    read_config=_read_config,
    names=BLOOM.names,
    prefix="transformer.",
    ignored_tensors=(r"h\.\d+\.self_attention\.(maybe_rotary|rotary_emb)\.inv_freq",),
)
