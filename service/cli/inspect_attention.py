"""Command `kvasir inspect attention`: print and draw the attention weights of a prompt."""

import importlib.util
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import Manifest, read_manifest
from model.config import ModelConfig
from model.inspect.attention_weights import weights_of_layer
from model.tokenizer.interface import Tokenizer
from service.config.settings import InspectAttentionSettings, SettingsError
from service.protocol.logprobs import format_token_name

# Limit of labels that are readable in one picture.
MAX_TOKENS = 64
_BYTES = "bytes:"  # prefix that `format_token_name` gives to a token that is not whole characters
_SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥", "\x7f": "^?"}
_MAX_ROWS = 12
_LINE_WIDTH = 112
_MAX_LABEL_LENGTH = 10  # characters of a label in the picture


def main(settings: InspectAttentionSettings) -> int:
    """Run `kvasir inspect attention`: print a layer's largest attention weights; draw all with `--out`."""
    if settings.out is not None and importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--out needs matplotlib, which is not installed; run `pip install matplotlib`")
    manifest = read_manifest(settings.checkpoint)
    heads = _heads(settings, manifest.config)
    tokenizer = manifest.verify()
    token_ids = _token_ids(settings, manifest, tokenizer)
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    weights_HTT = weights_of_layer(model, token_ids, layer=settings.layer)[heads]
    names = [format_token_name(tokenizer, token_id) for token_id in token_ids]
    print(*_summary_lines(weights_HTT, list(map(label, names)), layer=settings.layer, heads=heads), sep="\n")
    if settings.out is not None:
        from service.cli.attention_heatmap import draw_attention  # images for serving have no matplotlib

        title = f"{manifest.name}, layer {settings.layer}: each row shows what one token attends to"
        labels = [label(name, max_length=_MAX_LABEL_LENGTH) for name in names]
        draw_attention(settings.out, weights_HTT.numpy(), labels, heads=heads, title=title)
        print(f"\nwrote the heat maps to {settings.out}")
    return 0


def _heads(settings: InspectAttentionSettings, config: ModelConfig) -> list[int]:
    """Return the numbers of the heads to show. Raises SettingsError: the model lacks the layer or the head."""
    if settings.layer >= config.num_layers:
        raise SettingsError(f"--layer {settings.layer}: the model has layers 0 to {config.num_layers - 1}")
    if settings.head == "all":
        return list(range(config.num_heads))
    if not settings.head.isascii() or not settings.head.isdigit() or int(settings.head) >= config.num_heads:
        raise SettingsError(f"--head must be `all` or from 0 to {config.num_heads - 1}, not {settings.head!r}")
    return [int(settings.head)]


def _token_ids(settings: InspectAttentionSettings, manifest: Manifest, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of `--prompt` as served: after the begin-of-text token, if the tokenizer has one.

    Raises SettingsError if they exceed the model's context or, with `--out`, the `MAX_TOKENS` of a picture.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    token_ids = [*begin, *tokenizer.encode(settings.prompt)]
    context = manifest.config.max_context_length
    count = len(token_ids)
    if count > context:
        raise SettingsError(f"--prompt: {count} tokens exceed the model's context of {context}; shorten the prompt")
    if settings.out is not None and count > MAX_TOKENS:
        raise SettingsError(
            f"--prompt: {count} tokens, but a picture shows at most {MAX_TOKENS}; shorten the prompt or omit --out"
        )
    return token_ids


def _summary_lines(weights_HTT: Tensor, labels: Sequence[str], *, layer: int, heads: Sequence[int]) -> Iterator[str]:
    """Yield a title, then for each of the last 12 tokens its 4 most attended tokens, averaged over heads.

    If there are several heads, the top token of each head follows.
    """
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
    """Return the `count` tokens with the largest weights for one query token, as in "␣dog 25 %, ␣as 9 %"."""
    values, places = weights_T.topk(min(count, int(weights_T.count_nonzero())))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return ", ".join(f"{labels[place]} {value:.0%}".replace("%", " %") for value, place in pairs)


def label(name: str, *, max_length: int = 16) -> str:
    """Return a readable label for the name of a token: "␣dog", "↵↵", "^A", "U+200D", or "⟨f0 9f⟩" for bytes."""
    is_bytes = name.startswith(_BYTES)
    text = f"⟨{name[len(_BYTES) :].replace(chr(92) + 'x', ' ').strip()}⟩" if is_bytes else "".join(map(_visible, name))
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _visible(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if ord(character) < 0x20:
        return f"^{chr(ord(character) + 0x40)}"
    # Unicode categories Z and C: separators, controls, formats, surrogates, private use and unassigned.
    if unicodedata.category(character)[0] in "ZC":
        return f"U+{ord(character):04X}"
    # A combining character needs a base character to be visible.
    return f"◌{character}" if unicodedata.combining(character) else character
