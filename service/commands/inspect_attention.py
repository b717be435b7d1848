"""`kvasir inspect attention`."""

import importlib.util
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.attention.interface import ATTENTION_BACKENDS
from model.attention.weights import weights_of_layer
from model.checkpoint import load_model
from model.config import ModelConfig
from model.manifest import CheckpointError, Manifest, read_manifest
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.command_settings import InspectAttentionSettings
from service.logprobs import token_name
from service.settings import SettingsError
from service.token_labels import MAX_TOKENS, SUFFIXES, label

_NUM_TOLD = 12
_LINE_WIDTH = 112
_DRAWN_LENGTH = 10  # characters of a label in the picture


def main(settings: InspectAttentionSettings) -> int:
    """Look at one layer of one prompt."""
    try:
        if settings.out is not None:
            _check_out(settings.out)
        manifest = read_manifest(settings.checkpoint)
        heads = _heads(settings, manifest.config)
        tokenizer = manifest.verify()
        token_ids = _token_ids(settings, manifest, tokenizer)
        model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
        weights_HTT = weights_of_layer(model, token_ids, layer=settings.layer)[heads]
        names = [token_name(tokenizer, token_id) for token_id in token_ids]
        labels = [label(name) for name in names]
        print(*_told(weights_HTT, labels, layer=settings.layer, heads=heads), sep="\n")
        if settings.out is not None:
            title = f"{manifest.name}, layer {settings.layer}: each row is a token, and what it attends to"
            _draw(settings.out, weights_HTT, names, heads=heads, title=title)
            print(f"\ndrawn in {settings.out}")
    except (CheckpointError, TokenizerError, RuntimeError, MemoryError, OSError) as error:
        print(f"kvasir inspect attention: {error}", file=sys.stderr)
        return 1
    return 0


def _check_out(path: Path) -> None:
    """Refuse before anything is computed what cannot be written in the end."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"--out {path}: a picture ends in {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise SettingsError(f"--out {path}: {'is a directory' if path.is_dir() else f'no directory {path.parent}'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingsError(f"--out {path}: may not be written by this user; choose another place")
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--out needs matplotlib, which is not installed; run `pip install matplotlib`")


def _draw(path: Path, weights_HTT: Tensor, names: Sequence[str], *, heads: Sequence[int], title: str) -> None:
    """Write the picture."""
    from service.attention_picture import draw_attention  # needs matplotlib, which an image for serving lacks

    labels = [label(name, max_length=_DRAWN_LENGTH) for name in names]
    draw_attention(path, weights_HTT.numpy(), labels, heads=heads, title=title)


def _heads(settings: InspectAttentionSettings, config: ModelConfig) -> list[int]:
    """The heads that are asked for, once layer and heads are known to exist."""
    if settings.layer >= config.num_layers:
        raise SettingsError(f"--layer {settings.layer}: the model has layers 0 to {config.num_layers - 1}")
    if settings.head == "all":
        return list(range(config.num_heads))
    if not settings.head.isascii() or not settings.head.isdigit() or int(settings.head) >= config.num_heads:
        raise SettingsError(f"--head must be all or one of 0 to {config.num_heads - 1}, not {settings.head!r}")
    return [int(settings.head)]


def _token_ids(settings: InspectAttentionSettings, manifest: Manifest, tokenizer: Tokenizer) -> list[int]:
    """The prompt as it is served: with the mark that begins it, where there is one."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    token_ids = [*begin, *tokenizer.encode(settings.prompt)]
    context = manifest.config.max_context_length
    if len(token_ids) > context:
        raise SettingsError(f"--prompt: {len(token_ids)} tokens, the model's context is {context}; shorten it")
    if settings.out is not None and len(token_ids) > MAX_TOKENS:
        raise SettingsError(
            f"--prompt: {len(token_ids)} tokens, a picture shows {MAX_TOKENS} at most; shorten it, or leave out --out"
        )
    return token_ids


def _told(weights_HTT: Tensor, labels: Sequence[str], *, layer: int, heads: Sequence[int]) -> Iterator[str]:
    """Where the last tokens look: on average over the heads, and each head."""
    first = max(0, len(labels) - _NUM_TOLD)
    width = max(map(len, labels[first:]))
    several = len(heads) > 1
    whose = f"mean of {len(heads)} heads, then each head's most" if several else f"head {heads[0]}"
    yield f"layer {layer}, {whose}; the last {len(labels) - first} of {len(labels)} tokens"
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
    """The tokens with the greatest weights, "␣dog 25 %, ␣as 9 %"."""
    values, places = weights_T.topk(min(count, int(weights_T.count_nonzero())))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return ", ".join(f"{labels[place]} {value:.0%}".replace("%", " %") for value, place in pairs)
