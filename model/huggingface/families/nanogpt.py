"""nanoGPT's ckpt.pt: GPT-2 with exact GELU and optional biases. `kvasir convert` reads it; it is not in the table.

Source of names and defaults: `GPT` and `GPTConfig` in model.py of github.com/karpathy/nanoGPT.
"""

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.huggingface.families.family import Family, plain
from model.huggingface.families.gpt2 import GPT2
from model.huggingface.families.llama_like import size_of_heads
from model.huggingface.families.reader import ConfigReader


def _read_config(reader: ConfigReader) -> ModelConfig:
    width, heads = reader.size("n_embd", 768), reader.size("n_head", 12)
    bias = reader.flag("bias", True)
    reader.take("dropout")
    return ModelConfig(
        vocab_size=reader.size("vocab_size", 50304),
        max_context_length=reader.size("block_size", 1024),
        num_layers=reader.size("n_layer", 12),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size_of_heads(reader, width, heads),
        mlp_size=4 * width,
        position=PositionKind.LEARNED,
        rope_theta=10000.0,
        norm=NormKind.LAYER_NORM,
        norm_eps=1e-5,
        norm_bias=bias,
        mlp=MlpKind.GELU_EXACT,
        attention_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        tie_embeddings=True,
    )


NANOGPT = Family(
    model_type="nanogpt",
    architectures=("GPT",),
    read_config=_read_config,
    # GPT-2's names; nanoGPT stores all weights as (out, in).
    names={module: plain(names.modules[0]) for module, names in GPT2.names.items()},
    prefix="transformer.",
    ignored_tensors=(r"h\.\d+\.attn\.bias",),  # the causal mask of versions without flash attention
)
