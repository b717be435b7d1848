"""Optimizers of a training run and the learning-rate schedule.

Muon: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with updates scaled to the magnitude of AdamW's updates
(Liu et al. 2025, arXiv 2502.16982).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from model.training.config import TrainConfig


class Optimizers:
    """Muon for the hidden matrices of a model and AdamW for all other parameters, as one optimizer."""

    def __init__(self, model: nn.Module, *, matrix_lr: float, adam_lr: float, weight_decay: float) -> None:
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")}
        tables = [p for name, p in named.items() if p.ndim == 2 and name not in matrices]
        vectors = [p for p in named.values() if p.ndim == 1]
        self._names = {id(parameter): name for name, parameter in named.items()}
        muon = torch.optim.Muon(
            list(matrices.values()), lr=matrix_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
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
