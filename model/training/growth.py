"""Growth of a trained model: more layers and wider MLPs that compute what the smaller model computes.

A run then goes on from its logits, with more parameters (Chen et al. 2016, arXiv 1511.05641; Gesmundo & Maile 2023,
arXiv 2308.06103).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.config import ModelConfig
from model.config_enums import NormPlacement
from model.nn.transformer import initialize_parameter

GROWING = ("num_layers", "mlp_size")  # keys of a model that may be larger than in the checkpoint
# Keys that name layers or give each layer weights of its own, and mixtures of experts: their models do not grow.
_UNSUPPORTED = (
    "global_layers",
    "unrotated_layers",
    "layer_input_size",
    "num_kv_shared_layers",
    "has_layer_scalar",
    "experts",
)


def check_growth(smaller: ModelConfig, larger: ModelConfig) -> None:
    """Raise ValueError unless a model can grow: equal configs, but for `GROWING` keys that may be larger."""
    theirs, ours = smaller.to_dict(), larger.to_dict()
    different = [key for key in ours if ours[key] != theirs.get(key)]
    for key in different:
        if key not in GROWING:
            raise ValueError(f"its {key} is {theirs.get(key)}, the recipe's {ours[key]}; give both models equal values")
        if ours[key] < theirs[key]:
            raise ValueError(f"its {key} is {theirs[key]}, the recipe's {ours[key]}; a model can only grow")
    chosen = [key for key in _UNSUPPORTED if ours[key]]
    if larger.norm_placement is not NormPlacement.PRE:
        chosen.append("norm_placement")
    if different and chosen:
        raise ValueError(
            f"its {different[0]} is {theirs[different[0]]}, the recipe's {ours[different[0]]}; a model with its "
            f"{chosen[0]} cannot grow, give both models equal values"
        )


def grow(weights: Mapping[str, Tensor], smaller: ModelConfig, larger: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return weights of a larger model with the logits of a smaller one, in float32.

    Layer i of L copies layer i * l // L of l. Of the copies of one layer, all but the first add 0 to the residual
    stream: their `out` and `down` are 0. Added units of an MLP have random input weights, from a seed, and output
    weights 0.

    weights: of the smaller model. The configs must pass `check_growth`.
    """
    generator = torch.Generator().manual_seed(seed)
    grown = {}
    for name, shape in larger.parameter_shapes().items():
        source, is_added = name, False
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            old, previous = (
                layer * smaller.num_layers // larger.num_layers for layer in (int(number), int(number) - 1)
            )
            source, is_added = f"layers.{old}.{rest}", old == previous
        known = weights[source].float()
        writes = ".out." in name or ".down." in name  # to the residual stream
        if is_added and writes:
            grown[name] = torch.zeros(shape)
        elif known.shape == shape:
            grown[name] = known.clone()
        elif writes:
            grown[name] = torch.zeros(shape)
            grown[name][:, : known.shape[1]] = known
        else:
            grown[name] = initialize_parameter(name, torch.empty(shape), larger, generator)
            # Gate and up projection are the halves of one matrix, and of one bias.
            parts = 2 if larger.mlp.gated else 1
            for target, part in zip(grown[name].chunk(parts), known.chunk(parts), strict=True):
                target[: len(part)] = part
    return grown
