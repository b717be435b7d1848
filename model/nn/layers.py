"""Norms, MLPs and per-layer inputs of a transformer.

Legend: T packed tokens, E hidden size, F feed-forward size, X experts of a layer, C experts of a token, L layers,
P size of a layer's input.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import ModelConfig
from model.config_enums import Experts, MlpKind, NormKind


class Norm(nn.Module, ABC):
    """Norm of the last dimension, computed in float32. The result has the dtype of the input.

    fused: GPU kernel for `add`; None: PyTorch.
    """

    fused: "Callable[[Norm, Tensor, Tensor | None], tuple[Tensor, Tensor]] | None" = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x."""
        return self.add(x, None)[1]

    def add(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + added, which is x if `added` is None, and its norm."""
        if self.fused is not None:
            return self.fused(self, x, added)
        if added is not None:
            x = x + added
        return x, self._normalize(x)

    @abstractmethod
    def _normalize(self, x: Tensor) -> Tensor: ...


class RMSNorm(Norm):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight. Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4.

    `unit_offset` multiplies by 1 + weight instead (Gemma Team 2024, arXiv 2403.08295).
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__(size, eps)
        self.unit_offset = unit_offset

    def _normalize(self, x: Tensor) -> Tensor:
        weight_E = 1.0 + self.weight.float() if self.unit_offset else self.weight.float()
        return functional.rms_norm(x.float(), (x.shape[-1],), weight_E, self.eps).to(x.dtype)


class LayerNorm(Norm):
    """Layer norm: (x - mean) / sqrt(variance + eps) * weight + bias. Ba et al. 2016 (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float, *, bias: bool) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def _normalize(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), bias, self.eps).to(x.dtype)


def make_norm(config: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    """Return a new norm of the kind in the model config, for vectors of `size` numbers."""
    if config.norm is NormKind.RMS_NORM:
        return RMSNorm(size, config.norm_eps, unit_offset=config.norm_unit_offset)
    return LayerNorm(size, config.norm_eps, bias=config.norm_bias)


class Mlp(nn.Module):
    """MLP without a gate, down(f(up(x))), f of the config: Vaswani et al. 2017 (arXiv 1706.03762), section 3.3."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the MLP to each token; input and output have the shape (tokens, hidden size)."""
        out: Tensor = self.down(self.activation(self.up(x_TE)))
        return out


class GatedMlp(nn.Module):
    """Gated MLP, down(f(gate(x)) * up(x)); gate and up are one matrix: Shazeer 2020 (arXiv 2002.05202), equation 6.

    A GPU replaces `activate`, which computes f(gate) * up, by a fused kernel.
    """

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.activate: Callable[[Tensor], Tensor] = functools.partial(_activate_gate, ACTIVATIONS[config.mlp])

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the MLP to each token; input and output have the shape (tokens, hidden size)."""
        out: Tensor = self.down(self.activate(self.gate_up(x_TE)))
        return out


def _activate_gate(activation: Callable[[Tensor], Tensor], gate_up_TF: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return activation(gate_TF) * up_TF


def _gelu_tanh(x: Tensor) -> Tensor:
    """Apply the tanh form of GELU: Hendrycks & Gimpel 2016 (arXiv 1606.08415), section 2."""
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[MlpKind, Callable[[Tensor], Tensor]] = {
    MlpKind.GELU: _gelu_tanh,
    MlpKind.GELU_EXACT: functional.gelu,
    MlpKind.RELU: functional.relu,
    MlpKind.SWIGLU: functional.silu,
    MlpKind.GEGLU: _gelu_tanh,
}


class Router(nn.Module):
    """Router of a mixture of experts: chooses each token's experts and their weights, in float32; see `Experts`.

    The router is not an `nn.Linear`, because it stays a float matrix where linear layers are packed or quantized.
    """

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.num, config.hidden_size))
        self.num_chosen, self.normalizes = experts.num_per_token, experts.normalizes

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, most probable first: their float32 weights TC, and their numbers TC."""
        probabilities_TX = functional.linear(x_TE.float(), self.weight.float()).softmax(-1)
        weights_TC, experts_TC = probabilities_TX.topk(self.num_chosen, dim=-1)
        return weights_TC / weights_TC.sum(-1, keepdim=True) if self.normalizes else weights_TC, experts_TC


class SparseMlp(nn.Module):
    """Mixture of experts: the weighted sum of the outputs of each token's experts, in the order of their numbers."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.router = Router(config, experts)
        self.experts = nn.ModuleList(GatedMlp(config, experts.mlp_size) for _ in range(experts.num))

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply each token's experts; input and output have the shape (tokens, hidden size)."""
        weights_TC, experts_TC = self.router(x_TE)
        out_TE = torch.zeros_like(x_TE)
        for number in experts_TC.unique().tolist():
            tokens, places = torch.where(experts_TC == number)
            weights = weights_TC[tokens, places, None].to(x_TE.dtype)
            out_TE = out_TE.index_add(0, tokens, weights * self.experts[number](x_TE[tokens]))
        return out_TE


def make_mlp(config: ModelConfig, layer: int) -> Mlp | GatedMlp | SparseMlp:
    """Return a new MLP for a layer, gated or not or with experts, as the model config says."""
    if (experts := config.experts_of(layer)) is not None:
        return SparseMlp(config, experts)
    size = config.mlp_size_of(layer)
    return GatedMlp(config, size) if config.mlp.gated else Mlp(config, size)


class LayerInputs(nn.Module):
    """Per-layer embeddings: a vector of P numbers for each token and layer (Gemma 3n and 4).

    The vector is the scaled sum of a row of a second embedding and of the normed projection of the token's embedding.
    """

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.embedding = nn.Embedding(config.vocab_size, config.num_layers * size)
        self.projection = nn.Linear(config.hidden_size, config.num_layers * size, bias=False)
        self.norm = make_norm(config, size)

    def forward(self, token_ids_T: Tensor, x_TE: Tensor) -> Tensor:
        """Return the inputs of all layers, TLP, from the tokens' ids and embeddings."""
        rows_TLP = self.embedding(token_ids_T).unflatten(1, (self.num_layers, -1))
        # Round the factor to the model's dtype first, as transformers does.
        rows_TLP = rows_TLP * torch.full((), rows_TLP.shape[2] ** 0.5, dtype=x_TE.dtype, device=x_TE.device)
        projected_TLP = (self.projection(x_TE) * x_TE.shape[1] ** -0.5).unflatten(1, rows_TLP.shape[1:])
        out_TLP: Tensor = (self.norm(projected_TLP) + rows_TLP) * 2.0**-0.5
        return out_TLP


class LayerInput(nn.Module):
    """Last part of a layer with a `LayerInputs` vector: norm(out(f(gate(x)) * input)), added to x by the layer."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, size, bias=False)
        self.out = nn.Linear(size, config.hidden_size, bias=False)
        self.norm = make_norm(config, config.hidden_size)
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x_TE: Tensor, input_TP: Tensor) -> Tensor:
        """Return the vectors to add to x: (tokens, hidden size)."""
        added_TE: Tensor = self.norm(self.out(self.activation(self.gate(x_TE)) * input_TP))
        return added_TE
