"""Upper bound for the bytes of a text that one token can cover, for the `tokenizers` library. Torch-free.

A text far longer than the context is rejected before the slow tokenization. The check needs this bound: with it, the
length of a text in bytes gives a minimum number of tokens.

There is no bound if one token can cover a run of any length:
- unknown characters fused into one token,
- words that are not in the vocabulary,
- spaces that an added token or a pre-tokenizer swallows,
- characters that a normalizer drops.

A tokenizer with a component that this module does not know counts as unbounded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model.tokenizer.added_tokens import AddedToken
from model.tokenizer.decoders import TokenDecoder


def is_bounded(values: Mapping[str, Any], decoder: TokenDecoder, added_tokens: Sequence[AddedToken]) -> bool:
    """Return True if no token covers more bytes of a text than the longest token or character (4 bytes) has.

    Args:
        values: the object of a tokenizer.json.
        decoder, added_tokens: the decoder and the added tokens read from `values`.
    """
    keeps: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        "ByteLevel": lambda step: True,
        "Metaspace": lambda step: True,
        "Digits": lambda step: True,
        "Prepend": lambda step: True,
        "Split": lambda step: step.get("behavior") != "Removed",
        "Replace": lambda step: _replaces_by_as_much(step, decoder),
    }
    steps = [*_steps(values.get("normalizer"), "normalizers"), *_steps(values.get("pre_tokenizer"), "pretokenizers")]
    return (
        all(step.get("type") in keeps and keeps[step["type"]](step) for step in steps)
        and not any(token.trimmed for token in added_tokens)
        and _knows_what_it_covers(values["model"], decoder)
    )


def _knows_what_it_covers(model: Mapping[str, Any], decoder: TokenDecoder) -> bool:
    kind, vocabulary, unknown = model.get("type", "BPE"), model["vocab"], model.get("unk_token")
    if kind == "BPE":
        if unknown is None or unknown not in vocabulary:  # an unknown character raises an error, except white space
            return decoder.byte_level
        has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return bool(has_bytes or not model.get("fuse_unk"))
    return kind == "WordLevel" and unknown not in vocabulary


def _replaces_by_as_much(step: Mapping[str, Any], decoder: TokenDecoder) -> bool:
    old = step.get("pattern", {}).get("String")
    return isinstance(old, str) and len(decoder.token_bytes(step["content"])) >= len(old.encode())


def _steps(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [inner for part in step[name] for inner in _steps(part, name)] if step.get("type") == "Sequence" else [step]
