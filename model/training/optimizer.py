"""Optimizers of a training run and the learning-rate schedule.

Muon: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with updates scaled to the magnitude of AdamW's updates
(Liu et al. 2025, arXiv 2502.16982). torch.optim.Muon always orthogonalizes in bfloat16, which takes 30 times as long as
float32 on a processor that cannot multiply bfloat16.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from model.training.config import TrainConfig

_MOMENTUM = 0.95
_QUINTIC, _ITERATIONS = (3.4445, -4.775, 2.0315), 5  # coefficients and number of the Newton-Schulz iterations
_SMALLEST_NORM = 1e-7  # prevents a division by zero


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates of matrices, in `dtype`. In bfloat16 it equals torch.optim.Muon."""

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices from their gradients. Matrices without a gradient stay."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - _MOMENTUM)
                update = orthogonalize(matrix.grad.lerp(momentum, _MOMENTUM).to(self._dtype))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of a float matrix, and singular values between about 0.7 and 1.2."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    linear, cubic, quintic = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if is_tall else x


class Optimizers:
    """Muon for the hidden matrices of a model and AdamW for all other parameters, as one optimizer."""

    def __init__(
        self, model: nn.Module, *, matrix_lr: float, adam_lr: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")}
        tables = [p for name, p in named.items() if p.ndim == 2 and name not in matrices]
        vectors = [p for p in named.values() if p.ndim == 1]
        self._names = {id(parameter): name for name, parameter in named.items()}
        muon = Muon(matrices.values(), lr=matrix_lr, weight_decay=weight_decay, dtype=dtype)
        adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=adam_lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._with_peaks: tuple[tuple[torch.optim.Optimizer, float], ...] = ((muon, matrix_lr), (adam, adam_lr))

    def step(self, factor: float) -> None:
        """Update the parameters from their gradients at `factor` times the peak learning rates. Free the gradients."""
        for optimizer, peak in self._with_peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state tensors of both optimizers, named as "layers.0.mlp.down.weight/momentum_buffer"."""
        return {
            f"{self._names[id(parameter)]}/{key}": value
            for optimizer, _ in self._with_peaks
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors that `state_tensors` returned for the same model, each moved to the device of its parameter."""
        for optimizer, _ in self._with_peaks:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                prefix = self._names[id(parameter)] + "/"
                # The scalar step count stays on the CPU.
                optimizer.state[parameter] = {
                    key.removeprefix(prefix): tensor if tensor.ndim == 0 else tensor.to(parameter.device)
                    for key, tensor in tensors.items()
                    if key.startswith(prefix)
                }


def rate_factor(step: int, config: TrainConfig) -> float:
    """Return the learning rate at a step as a share of its peak: linear warm-up, plateau, linear decay to zero.

    During the plateau, a run can be lengthened or shortened without a change to the steps already done
    (warmup-stable-decay, Hu et al. 2024, arXiv 2404.06395, section 4).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    remaining = config.steps - step
    return min(1.0, remaining / config.decay_steps) if config.decay_steps else 1.0
