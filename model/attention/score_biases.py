"""Position biases of attention scores: buckets (T5), slopes (ALiBi) and disentangled attention (DeBERTa).

A distance is query position - key position, so visible keys have distances >= 0.

Legend: B sequences, Q query tokens of a sequence, S its context, H query heads, K key/value heads, D head dimension,
E hidden size, R relative positions in the table.
"""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.config_enums import PositionKind


class RelativeBias(nn.Module):
    """Trained attention bias for each head and bucket of distances: one table (buckets, H), shared by all layers.

    Raffel et al. 2019, T5 (arXiv 1910.10683), section 2.1. The first half of the buckets holds one distance each. The
    widths of the other buckets grow logarithmically up to `max_distance`. The last bucket also holds larger distances.
    """

    def __init__(self, config: ModelConfig, table: nn.Embedding | None) -> None:
        super().__init__()
        assert table is not None
        assert config.max_relative_distance is not None
        self.max_distance = config.max_relative_distance
        self._shared = (table,)  # in a tuple, so that nn.Module does not register it as a submodule of this layer

    def forward(self, q_BQHD: Tensor, k_BSKD: Tensor, distances_BQS: Tensor) -> Tensor:  # see `ScoreBias`
        bias_BQSH: Tensor = self._shared[0](self.buckets(distances_BQS))
        return bias_BQSH.movedim(-1, 1)

    def buckets(self, distances: Tensor) -> Tensor:
        """Return the T5 bucket of each token distance, int64; negative distances get the bucket of distance 0."""
        num_buckets = self._shared[0].num_embeddings
        num_exact = num_buckets // 2
        distances = distances.clamp(min=0)
        share = (distances.clamp(min=1) / num_exact).log() / math.log(self.max_distance / num_exact)
        grown = num_exact + (share * (num_buckets - num_exact)).long()
        return torch.where(distances < num_exact, distances, grown.clamp(max=num_buckets - 1))


class AlibiBias(nn.Module):
    """Attention bias -slope * distance, without trained parameters: Press et al. 2021, ALiBi (arXiv 2108.12409).

    For H = 2^n heads the slopes are 2^(-8/H), 2^(-16/H), ..., 2^-8. For another H, the slopes of the next lower power
    of two are followed by every second slope of the next higher power of two, as in the authors' code.
    """

    slopes_H: Tensor

    def __init__(self, config: ModelConfig, table: nn.Embedding | None) -> None:
        super().__init__()
        num_heads = config.num_heads
        below = 2 ** int(math.log2(num_heads))
        slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
        slopes += [2 ** (-8 * (2 * head + 1) / (2 * below)) for head in range(num_heads - below)]
        # On the CPU even if the model is built on the meta device: checkpoints do not hold this constant.
        self.register_buffer("slopes_H", torch.tensor(slopes, device="cpu"), persistent=False)

    def forward(self, q_BQHD: Tensor, k_BSKD: Tensor, distances_BQS: Tensor) -> Tensor:  # see `ScoreBias`
        return -self.slopes_H[:, None, None] * distances_BQS[:, None]


class DisentangledBias(nn.Module):
    """Position terms of disentangled attention: He et al. 2020, DeBERTa (arXiv 2006.03654), equation 4.

    score(i, j) = scale * (q_i·k_j + q_i·K[d] + k_j·Q[d]). This class computes the last two terms. K and Q are
    projections of a trained table (k, E) of k relative positions, shared by all layers. d is min(i - j, k - 1): causal
    attention needs only the k of the paper's 2k positions. As in the authors' code, both terms use the same d.
    """

    def __init__(self, config: ModelConfig, table: nn.Embedding | None) -> None:
        super().__init__()
        assert table is not None
        self.query = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.head_dim = config.head_dim
        self.scale = config.effective_score_scale
        self._shared = (table,)  # in a tuple, so that nn.Module does not register it as a submodule of this layer

    def forward(self, q_BQHD: Tensor, k_BSKD: Tensor, distances_BQS: Tensor) -> Tensor:  # see `ScoreBias`
        table_RE = self._shared[0].weight
        q_RHD = torch.unflatten(self.query(table_RE), -1, (-1, self.head_dim))
        k_RKD = torch.unflatten(self.key(table_RE), -1, (-1, self.head_dim))
        groups = q_RHD.shape[1] // k_RKD.shape[1]
        k_RHD = k_RKD.repeat_interleave(groups, dim=1).to(q_BQHD.dtype)
        k_BSHD = k_BSKD[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3)  # a view if groups == 1
        content_BHQR = torch.einsum("bqhd,rhd->bhqr", q_BQHD, k_RHD)
        index_BQS = distances_BQS.clamp(0, len(table_RE) - 1)
        index_BHQS = index_BQS[:, None].expand(*content_BHQR.shape[:3], k_BSKD.shape[1])
        content_BHQS = content_BHQR.gather(-1, index_BHQS)
        q_RHD = q_RHD.to(k_BSKD.dtype)
        if q_BQHD.shape[1] == 1:  # each key has one distance, so products with all R table rows would be wasted
            position_BHQS = (k_BSHD * q_RHD[index_BQS[:, 0]]).sum(-1).transpose(1, 2)[:, :, None]
        else:
            position_BHSR = torch.einsum("bshd,rhd->bhsr", k_BSHD, q_RHD)
            position_BHQS = position_BHSR.gather(-1, index_BHQS.transpose(2, 3)).transpose(2, 3)
        return (content_BHQS + position_BHQS) * self.scale


SCORE_BIASES: dict[PositionKind, type[RelativeBias] | type[AlibiBias] | type[DisentangledBias]] = {
    PositionKind.RELATIVE_BIAS: RelativeBias,
    PositionKind.ALIBI: AlibiBias,
    PositionKind.DISENTANGLED: DisentangledBias,
}


def relative_positions(config: ModelConfig) -> nn.Embedding | None:
    """Return the trained table that all layers' position biases share; None unless they are T5's or DeBERTa's."""
    match config.position:
        case PositionKind.RELATIVE_BIAS:
            assert config.num_relative_buckets is not None
            return nn.Embedding(config.num_relative_buckets, config.num_heads)
        case PositionKind.DISENTANGLED:
            assert config.max_relative_distance is not None
            return nn.Embedding(config.max_relative_distance, config.hidden_size)
        case _:
            return None
