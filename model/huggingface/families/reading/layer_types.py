"""Readers of keys of config.json that differ between layers: kinds of attention, and rotary embeddings by kind."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from model.huggingface.families.reading.reader import ConfigReader, read_rope

_KINDS = ("full_attention", "sliding_attention")


def read_layer_types(
    reader: ConfigReader, num_layers: int, *, window: int | None, slides: Callable[[int], bool]
) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig: the window, and the layers without one; empty if all lack it.

    Args:
        window: the size of the window in tokens; None: no window.
        slides: returns whether a layer has the window; used only if the config has no `layer_types`.
    """
    types = reader.value("layer_types")
    if types is None:
        types = [_KINDS[window is not None and slides(layer)] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _KINDS for kind in types):
        reader.reject(
            "layer_types", types, f"expected a list of {num_layers}, each {' or '.join(_KINDS)}; correct the config"
        )
    if "sliding_attention" not in types:
        return {}
    if window is None:
        reader.reject(
            "layer_types", types, "sliding_attention needs a sliding_window that is enabled; correct the config"
        )
    global_layers = tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")
    return {"sliding_window": window, "global_layers": global_layers}


def split_rope(reader: ConfigReader, own: Collection[str]) -> tuple[ConfigReader, dict[str, Any]]:
    """Split the rotary embedding's settings: return a reader of the usual keys, and a dict of the family's `own` keys.

    An own key with the value null, 0 or false is dropped.
    """
    values: dict[str, Any] = {"rope_theta": reader.value("rope_theta")}
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        values[name] = reader.value(name)
        if isinstance(values[name], Mapping):
            found |= {key: value for key, value in values[name].items() if key in own and value}
            values[name] = {key: value for key, value in values[name].items() if key not in own}
    return ConfigReader(reader.path, values), found


def read_two_ropes(
    reader: ConfigReader,
    positions: int,
    head_dim: int,
    *,
    old_keys: tuple[tuple[str, ...], tuple[str, ...]],
    thetas: tuple[float, float],
    absent: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ModelConfig fields of two rotary embeddings: of layers without and with a window.

    Raises CheckpointError for a scaling in layers with a window, or if old and new keys set different values.

    Args:
        positions: the model's context length.
        old_keys: keys of each embedding in old files, the key of its base first. In new files `rope_parameters` has an
            object for each kind of layer.
        thetas: default base of each embedding.
        absent: value of an absent `rope_parameters`.
    """
    given = reader.value("rope_parameters")
    by_kind = (absent or {}) if given is None else given
    if not isinstance(by_kind, Mapping) or by_kind.keys() - set(_KINDS):
        remedy = f"expected an object with the keys {' and '.join(_KINDS)}; correct the config"
        reader.reject("rope_parameters", given, remedy)
    old = {key: reader.value(key) for key in {*old_keys[0], *old_keys[1]}}
    ropes = []
    for kind, keys, theta in zip(_KINDS, old_keys, thetas, strict=True):
        values = {key: old[key] for key in keys} | {"rope_parameters": by_kind.get(kind)}
        inner = ConfigReader(reader.path, values, prefix=f"{kind} ")
        ropes.append(read_rope(inner, max_positions=positions, theta_names=keys[:1], theta=theta))
    full, local = ropes
    if local.scaling is not None:
        reader.reject("rope_parameters", given, "scaling in layers with a window is not implemented; use another model")
    return {"rope_theta": full.theta, "rope_scaling": full.scaling, "local_rope_theta": local.theta}
