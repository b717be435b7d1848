"""Heat maps of attention weights: one panel per head, one row per query token, one column per key token."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.image import AxesImage
from numpy.typing import NDArray

_MAIN_FONT = "DejaVu Sans"  # comes with matplotlib
_NO_FONT = "Last Resort"  # comes with matplotlib; shows every character as a box
_COLOURS = "YlGnBu"
# Inches per token in a panel, for the labels and title around a panel, and at least for a panel.
_TOKEN_INCHES, _LABEL_INCHES, _LEAST_INCHES = 0.2, 0.85, 1.6
_MAX_LABELLED = 16  # with more heads, only the panels at the left and lower edge have token labels
_MAX_PIXELS = 40_000_000


def draw_attention(
    path: Path, weights_HTT: NDArray[np.float32], labels: Sequence[str], *, heads: Sequence[int], title: str
) -> None:
    """Write heat maps of attention weights to `path`, whose suffix (.png, .svg or .pdf) sets the format.

    weights_HTT: weights of the H `heads`, T query tokens by T key tokens; 0 above the diagonal.
    labels: readable text of each token. heads: number of each head in its layer.
    """
    families, shown = _fonts(labels)
    columns = min(len(heads), max(1, math.ceil(math.sqrt(len(heads) * 1.4))))
    rows = math.ceil(len(heads) / columns)
    panel = max(_LEAST_INCHES, _TOKEN_INCHES * len(labels))
    width, height = columns * (panel + _LABEL_INCHES) + 0.9, rows * (panel + _LABEL_INCHES) + 0.6
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(len(heads))]
    image = None
    for place, axes in enumerate(panels):
        image = _draw_head(axes, weights_HTT[place], shown, families)
        axes.set_title(f"head {heads[place]}", fontsize=10, loc="left", fontweight="bold")
        if len(heads) > _MAX_LABELLED:
            is_left, is_lowest = place % columns == 0, place + columns >= len(heads)
            axes.tick_params(labelleft=is_left, labelbottom=is_lowest)
    assert image is not None, "no heads to draw"
    bar = figure.colorbar(image, ax=panels, shrink=min(1.0, 4 / height), aspect=25, ticks=[0, 0.05, 0.25, 0.5, 0.75, 1])
    bar.ax.set_yticklabels(["0", "5 %", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    bar.outline.set_linewidth(0.4)
    bar.set_label("share of a row's attention", fontsize=8)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", fontfamily=families, parse_math=False)
    dpi = min(150.0, math.sqrt(_MAX_PIXELS / (width * height)))
    figure.savefig(path, dpi=dpi, facecolor="white")


def _draw_head(axes: Axes, weights_TT: NDArray[np.float32], labels: Sequence[str], families: list[str]) -> AxesImage:
    """Draw the heat map of one head. Key tokens after the query token, which are masked, stay white."""
    size = len(labels)
    future_TT = np.triu(np.ones((size, size), dtype=bool), k=1)
    # The square root makes small weights visible, and keeps 0 and 1.
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
    image = axes.imshow(np.ma.masked_array(weights_TT, future_TT), cmap=_COLOURS, norm=norm, interpolation="nearest")
    axes.set_xticks(range(size), labels=labels, rotation=90, fontsize=8, fontfamily=families, parse_math=False)
    axes.set_yticks(range(size), labels=labels, fontsize=8, fontfamily=families, parse_math=False)
    axes.tick_params(length=0, pad=3)
    axes.set_xticks(np.arange(-0.5, size), minor=True)
    axes.set_yticks(np.arange(-0.5, size), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return image


def _fonts(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return names of fonts with the labels' characters, and the labels with U+… for characters that no font has."""
    missing = {ord(character) for text in labels for character in text}
    families = [_MAIN_FONT]
    missing -= _characters(font_manager.findfont(_MAIN_FONT))
    for entry in sorted(font_manager.fontManager.ttflist, key=lambda entry: entry.name):
        is_plain = entry.style == "normal" and entry.weight == 400 and not entry.name.startswith(_NO_FONT)
        if missing and is_plain and (found := missing & _characters(entry.fname)):
            families.append(entry.name)
            missing -= found
    return families, [text.translate({code: f"U+{code:04X}" for code in missing}) for text in labels]


def _characters(font: str) -> set[int]:
    """Return the code points that a font file contains; an empty set for a bitmap font (emoji)."""
    face = FT2Font(font)
    return set(face.get_charmap()) if face.scalable else set()
