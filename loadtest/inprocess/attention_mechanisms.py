"""Attention mechanisms of docs/attention.md: a recipe each, and the mechanism from which it differs by one choice.

A recipe extends another recipe, and states only its changes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.training.config import TrainConfig, load_train_config

RECIPES = Path(__file__).resolve().parent.parent.parent / "model" / "training" / "configs" / "attention"
BASELINE = "multi-head"


@dataclass(frozen=True, slots=True)
class Row:
    """One mechanism.

    name: name of its recipe and of its runs. title: name on the page. compared_with: the row from which it differs
    by one choice.
    """

    name: str
    title: str
    compared_with: str = BASELINE

    @property
    def recipe_file(self) -> Path:
        """Path of the recipe."""
        return RECIPES / f"{self.name}.toml"

    def recipe(self) -> TrainConfig:
        """Read the recipe. Raises ValueError as `load_train_config` does."""
        return load_train_config(self.recipe_file)

    def changes(self) -> dict[str, Any]:
        """Return the model's settings that differ from the compared row, JSON-ready."""
        own, other = (load_train_config(RECIPES / f"{name}.toml").model for name in (self.name, self.compared_with))
        before = other.to_dict()
        return {key: value for key, value in own.to_dict().items() if value != before[key]}


ROWS = (
    Row("average", "simple average", "learned"),
    Row("single-head", "single-head"),
    Row("multi-head", "multi-head, rotary (the baseline)"),
    Row("grouped-query", "grouped-query, 2 of 4"),
    Row("multi-query", "multi-query"),
    Row("none", "no positions"),
    Row("learned", "learned positions"),
    Row("sinusoidal", "sinusoidal positions"),
    Row("sinusoidal-scaled", "sinusoidal, token embeddings x sqrt(width)", "sinusoidal"),
    Row("scaled-embeddings", "rotary, token embeddings x sqrt(width)"),
    Row("partial-rotary", "partial rotary, 8 of 32"),
    Row("relative-bias", "relative bias (T5)"),
    Row("alibi", "linear biases (ALiBi)"),
    Row("disentangled", "disentangled (DeBERTa)"),
    Row("sliding-window", "sliding window of 32, but in the last layer"),
    Row("qk-norm", "normalised queries and keys"),
)
