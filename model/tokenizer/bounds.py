"""Whether a tokenizer of the `tokenizers` library makes at least so many tokens of a text of so many bytes. Torch-free.

A text far over the context is refused before it is tokenized, which takes long. That needs a most that one token can
stand for, and there is none where a token of any kind covers a run without end: unknown characters fused to one, words
that are not in the vocabulary, spaces that an added token or a pre-tokenizer swallows, letters a normalizer drops.
What is not known here has no bound.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model.tokenizer.added_tokens import AddedToken
from model.tokenizer.decoders import TokenDecoder


def is_bounded(values: Mapping[str, Any], decoder: TokenDecoder, added_tokens: Sequence[AddedToken]) -> bool:
    """Whether no token stands for more bytes of a text than the longest token has, or than one character (4).

    Args:
        values: the object of a tokenizer.json.
        decoder, added_tokens: what it says.
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
        if unknown is None or unknown not in vocabulary:  # what has no token is refused, but for spaces
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
