"""OLMo 2 and 3, and EXAONE 4: Llama's layers with norms after attention and MLP, and norms of q and k.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config_enums import NormPlacement, QkNormScope
from model.huggingface.families.reading.family import plain
from model.huggingface.families.reading.layer_types import read_layer_types, read_two_ropes
from model.huggingface.families.reading.llama_like import derived_family
from model.huggingface.families.reading.reader import ConfigReader


def _read_olmo2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    norms = {"qk_norm": True, "qk_norm_scope": QkNormScope.PROJECTION, "norm_placement": NormPlacement.POST}
    return {"attention_bias": reader.flag("attention_bias", False), **norms}


def _read_olmo3(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    windows = read_layer_types(
        reader,
        fields["num_layers"],
        window=reader.optional_size("sliding_window", 4096),
        slides=lambda layer: (layer + 1) % 4 != 0,
    )
    is_same = fields["rope_scaling"] is None and fields["local_rope_theta"] == fields["rope_theta"]
    ropes = {"local_rope_theta": None} if is_same or not windows else {}
    return {**_read_olmo2(reader, fields), **windows, **ropes}


def _read_exaone4(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(fields["num_layers"])
    window = reader.optional_size("sliding_window", 4096)
    given = reader.value("sliding_window_pattern")
    # The pattern is the period, or its letters: L for a layer with the window, G for one without.
    period = len(given) if isinstance(given, str) and given == "L" * (len(given) - 1) + "G" else given or 4
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        remedy = "expected a number of layers, or L for each layer with a window and G for the last; correct the config"
        reader.reject("sliding_window_pattern", given, remedy)
    windows = read_layer_types(reader, len(layers), window=window, slides=lambda layer: (layer + 1) % period != 0)
    return {
        "norm_placement": NormPlacement.POST,
        "qk_norm": True,
        "qk_norm_scope": QkNormScope.HEAD,
        # A model with windows has no positions in its other layers.
        "unrotated_layers": () if window is None else windows.get("global_layers", tuple(layers)),
        **windows,
    }


_OUT_NORMS = {
    "layers.#.attention_norm": plain("layers.#.post_attention_layernorm"),
    "layers.#.mlp_norm": plain("layers.#.post_feedforward_layernorm"),
}
POST_NORM = (
    # OLMo 2 (arXiv 2501.00656): q and k normalized over all heads together.
    derived_family("olmo2", "Olmo2", _read_olmo2, renamed=_OUT_NORMS, vocab_size=50304, rms_norm_eps=1e-5),
    # OLMo 3 (arXiv 2512.13961): as OLMo 2, with a window in three of four layers. The others have scaled positions.
    derived_family(
        "olmo3",
        "Olmo3",
        _read_olmo3,
        renamed=_OUT_NORMS,
        read_ropes=partial(
            read_two_ropes, old_keys=(("rope_theta", "rope_scaling"), ("rope_theta",)), thetas=(500_000.0, 500_000.0)
        ),
        vocab_size=50304,
        rms_norm_eps=1e-5,
    ),
    # EXAONE 4 (arXiv 2507.11407): q and k normalized per head, and positions in layers with a window only.
    derived_family(
        "exaone4",
        "Exaone4",
        _read_exaone4,
        renamed=_OUT_NORMS,
        vocab_size=102400,
        intermediate_size=16384,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
    ),
)
