"""Command `kvasir inspect attention`: print and draw the attention weights of a prompt."""

import importlib.util
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from model.config import ModelConfig
from model.inspect.attention_weights import weights_of_layer
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.cli.token_labels import MAX_TOKENS, SUFFIXES, label
from service.config.settings import InspectAttentionSettings, SettingsError
from service.protocol.logprobs import format_token_name

_MAX_ROWS = 12
_LINE_WIDTH = 112
_MAX_LABEL_LENGTH = 10  # characters of a label in the picture


def main(settings: InspectAttentionSettings) -> int:
    """Print the attention weights of one layer, and draw them if `--out` is given. Exit codes: 0 success, 1 failure."""
    try:
        if settings.out is not None:
            _check_out(settings.out)
        manifest = read_manifest(settings.checkpoint)
        heads = _heads(settings, manifest.config)
        tokenizer = manifest.verify()
        token_ids = _token_ids(settings, manifest, tokenizer)
        model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
        weights_HTT = weights_of_layer(model, token_ids, layer=settings.layer)[heads]
        names = [format_token_name(tokenizer, token_id) for token_id in token_ids]
        labels = [label(name) for name in names]
        print(*_summary_lines(weights_HTT, labels, layer=settings.layer, heads=heads), sep="\n")
        if settings.out is not None:
            title = f"{manifest.name}, layer {settings.layer}: each row shows what one token attends to"
            _draw(settings.out, weights_HTT, names, heads=heads, title=title)
            print(f"\nwrote {settings.out}")
    except (CheckpointError, TokenizerError, RuntimeError, MemoryError, OSError) as error:
        print(f"kvasir inspect attention: {error}", file=sys.stderr)
        return 1
    return 0


def _check_out(path: Path) -> None:
    """Check that the picture can be written, before anything is computed.

    Raises:
        SettingsError: the path cannot be written, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"--out {path}: the file name of a picture must end in {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise SettingsError(
            f"--out {path}: {'is a directory' if path.is_dir() else f'there is no directory {path.parent}'}"
            "; choose another path"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingsError(f"--out {path}: this user has no permission to write it; choose another path")
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--out needs matplotlib, which is not installed; run `pip install matplotlib`")


def _draw(path: Path, weights_HTT: Tensor, names: Sequence[str], *, heads: Sequence[int], title: str) -> None:
    """Write the picture."""
    from service.cli.attention_heatmap import draw_attention  # imported here: images for serving have no matplotlib

    labels = [label(name, max_length=_MAX_LABEL_LENGTH) for name in names]
    draw_attention(path, weights_HTT.numpy(), labels, heads=heads, title=title)


def _heads(settings: InspectAttentionSettings, config: ModelConfig) -> list[int]:
    """Return the requested heads.

    Raises:
        SettingsError: the layer or the head does not exist.
    """
    if settings.layer >= config.num_layers:
        raise SettingsError(f"--layer {settings.layer}: the model has layers 0 to {config.num_layers - 1}")
    if settings.head == "all":
        return list(range(config.num_heads))
    if not settings.head.isascii() or not settings.head.isdigit() or int(settings.head) >= config.num_heads:
        raise SettingsError(f"--head must be `all` or from 0 to {config.num_heads - 1}, not {settings.head!r}")
    return [int(settings.head)]


def _token_ids(settings: InspectAttentionSettings, manifest: Manifest, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's token ids as served, with the begin-of-text token if the tokenizer has one.

    Raises:
        SettingsError: the prompt is longer than the context, or than a picture can show.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    token_ids = [*begin, *tokenizer.encode(settings.prompt)]
    context = manifest.config.max_context_length
    if len(token_ids) > context:
        raise SettingsError(f"--prompt: {len(token_ids)} tokens exceed the model's context of {context}; shorten it")
    if settings.out is not None and len(token_ids) > MAX_TOKENS:
        raise SettingsError(
            f"--prompt: {len(token_ids)} tokens, but a picture shows at most {MAX_TOKENS}; shorten it or omit --out"
        )
    return token_ids


def _summary_lines(weights_HTT: Tensor, labels: Sequence[str], *, layer: int, heads: Sequence[int]) -> Iterator[str]:
    """Yield lines with the tokens that the last tokens attend to most: averaged over the heads, and by each head."""
    first = max(0, len(labels) - _MAX_ROWS)
    width = max(map(len, labels[first:]))
    several = len(heads) > 1
    scope = f"mean of {len(heads)} heads, then each head's top token" if several else f"head {heads[0]}"
    yield f"layer {layer}, {scope}; the last {len(labels) - first} of {len(labels)} tokens"
    mean_TT = weights_HTT.mean(0)
    for row in range(first, len(labels)):
        yield f"{row:>5}  {labels[row]:<{width}}  {_most(mean_TT[row], labels, 4)}"
        if several:
            each = [f"{head}: {_most(weights_HTT[i, row], labels, 1)}" for i, head in enumerate(heads)]
            unbroken = [words.replace(" ", "\N{NO-BREAK SPACE}") for words in each]
            margin = " " * (9 + width)
            lines = textwrap.wrap(" · ".join(unbroken), _LINE_WIDTH, initial_indent=margin, subsequent_indent=margin)
            yield from (line.replace("\N{NO-BREAK SPACE}", " ") for line in lines)


def _most(weights_T: Tensor, labels: Sequence[str], count: int) -> str:
    """Return the tokens with the greatest weights, as in "␣dog 25 %, ␣as 9 %"."""
    values, places = weights_T.topk(min(count, int(weights_T.count_nonzero())))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return ", ".join(f"{labels[place]} {value:.0%}".replace("%", " %") for value, place in pairs)
