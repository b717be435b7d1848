"""Token labels and the attention heat map."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from service.cli import attention_heatmap
from service.cli.attention_heatmap import draw_attention
from service.cli.inspect_attention import label

HARD = ["␣a", "你好", "שלום", "🦊", "$x^2$", r"$\frac{1}{0}$", "U+200D", "◌́", "\U0010fffd", "_^{}"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (" dog", "␣dog"),
        ("\n\n", "↵↵"),
        ("\t\x00\x1b\x7f", "⇥^@^[^?"),
        ("bytes:\\xf0\\x9f", "⟨f0 9f⟩"),
        ("\u200d\u202e", "U+200DU+202E"),
        ("\u00a0\u3000", "U+00A0U+3000"),
        ("\u0301", "◌\u0301"),
        ("<|endoftext|>", "<|endoftext|>"),
        ("你好", "你好"),
        ("a" * 17, "a" * 15 + "…"),
        ("", ""),
    ],
)
def test_labels_show_invisible_characters(name: str, wanted: str) -> None:
    assert label(name) == wanted
    assert "\n" not in label(name)


def even(size: int, heads: int = 1) -> np.ndarray:
    """Return causal attention weights in which each token attends equally to itself and all earlier tokens."""
    triangle = np.tril(np.ones((heads, size, size), dtype=np.float32))
    return triangle / triangle.sum(-1, keepdims=True)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_every_picture_format_is_drawn_with_any_labels(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    draw_attention(path, even(len(HARD), 3), HARD, heads=[0, 1, 5], title="$ layer")
    assert path.stat().st_size > 1000


def test_masked_positions_are_white(tmp_path: Path) -> None:
    path, weights = tmp_path / "one.png", np.eye(2, dtype=np.float32)[None]
    draw_attention(path, weights, ["", ""], heads=[0], title="")
    image = imread(path)[..., :3].reshape(-1, 3)
    dark = (image.sum(1) < 1.0).sum()
    draw_attention(path, np.array([[[1, 0], [1, 0]]], dtype=np.float32), ["", ""], heads=[0], title="")
    moved = imread(path)[..., :3].reshape(-1, 3)
    assert dark > 1000
    assert (moved.sum(1) < 1.0).sum() == pytest.approx(dark, rel=0.1), "both matrices have two weights of 1"
    assert not np.array_equal(image, moved)


def test_a_character_missing_from_all_fonts_is_shown_as_code_point() -> None:
    families, shown = attention_heatmap._fonts(["a\U0010fffd"])
    assert families == ["DejaVu Sans"]
    assert shown == ["aU+10FFFD"]


def test_a_picture_of_many_heads_has_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_heatmap, "_MAX_PIXELS", 300_000)
    path = tmp_path / "many.png"
    draw_attention(path, even(3, 18), ["a", "b", "c"], heads=range(18), title="")
    height, width, _ = imread(path).shape
    assert 250_000 < height * width < 310_000
