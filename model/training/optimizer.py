"""Optimizers (Muon for the hidden matrices, AdamW for the rest) and learning-rate schedule.

Muon: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); its updates are scaled to the magnitude of AdamW's as in
Liu et al. 2025 (arXiv 2502.16982), so that both use similar learning rates. Both optimizers are PyTorch's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model.training.config import TrainConfig


class Optimizers:
    """Both optimizers behind one interface, with a state of plain named tensors.

    With `muon=False`, AdamW also updates the hidden matrices, as a baseline for Muon.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, *, muon: bool = True) -> None:
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if muon and p.ndim == 2 and name.startswith("layers.")}
        tables = {name: p for name, p in named.items() if p.ndim == 2 and name not in matrices}
        vectors = {name: p for name, p in named.items() if p.ndim == 1}
        self._names = {id(parameter): name for name, parameter in named.items()}
        self.config = config
        self._muon = None
        if matrices:
            self._muon = torch.optim.Muon(
                list(matrices.values()),
                lr=config.matrix_lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        self._adam = torch.optim.AdamW(
            [
                {"params": list(tables.values()), "weight_decay": config.weight_decay},
                {"params": list(vectors.values()), "weight_decay": 0.0},
            ],
            lr=config.adam_lr,
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, step: int) -> None:
        """Update the parameters at the learning rates of this step, and free the gradients."""
        factor = rate_factor(step, self.config)
        for optimizer, peak in self._with_peaks():
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _with_peaks(self) -> Iterator[tuple[torch.optim.Optimizer, float]]:
        """Yield each optimizer with its peak learning rate."""
        if self._muon is not None:
            yield self._muon, self.config.matrix_lr
        yield self._adam, self.config.adam_lr

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state tensors of both optimizers, keyed by `<parameter>/<key>`."""
        return {
            f"{self._names[id(parameter)]}/{key}": value
            for optimizer, _ in self._with_peaks()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the `state_tensors` of an equal model.

        Raises:
            ValueError: a parameter's state is missing.
        """
        for optimizer, _ in self._with_peaks():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    prefix = self._names[id(parameter)] + "/"
                    state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
                    if not state:
                        raise ValueError(f"no optimizer state for {prefix[:-1]}")
                    # The scalar step count stays on its device; moments move to the device of their parameter.
                    optimizer.state[parameter] = {
                        key: value.clone() if value.ndim == 0 else value.to(parameter.device, copy=True)
                        for key, value in state.items()
                    }


def rate_factor(step: int, config: TrainConfig) -> float:
    """Return the learning rate at a step as a share of its peak: linear warm-up, plateau, linear decay to zero.

    Warmup-stable-decay: Hu et al. 2024, MiniCPM (arXiv 2404.06395), section 4. It allows a run to be lengthened or
    shortened during the plateau without changing the steps already done.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    remaining = config.steps - step
    return min(1.0, remaining / config.decay_steps) if config.decay_steps else 1.0
