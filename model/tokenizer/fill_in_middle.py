"""Fill in the middle (Bavarian et al. 2022, arXiv 2207.14255): prompts of a text before and a text after a gap.

A model that was trained for it has tokens that mark the two texts and the gap. `_FORMATS` lists the published sets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.tokenizer.interface import Tokenizer

_PREFIX, _SUFFIX = "prefix", "suffix"
_PIPED = ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>")
_PLAIN = ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>")
_DEEPSEEK = ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>")
_LLAMA = ("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>")
_MISTRAL = ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX)
# Parts of a prompt in order, and further tokens at which a completion ends. A tokenizer may lack the further tokens.
_FORMATS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # Qwen2.5-Coder, CodeGemma, Granite 4, cl100k_base
    (_PIPED, ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|im_end|>")),
    # StarCoder, SmolLM, Granite code
    (_PLAIN, ("<|endoftext|>", "<fim_pad>", "<filename>", "<file_sep>", "<repo_name>", "<reponame>")),
    (_DEEPSEEK, ("<｜end▁of▁sentence｜>", "<|EOT|>")),  # DeepSeek-Coder
    (_LLAMA, ("▁<EOT>",)),  # CodeLlama
    (_MISTRAL, ("[MIDDLE]",)),  # Codestral
)
# A character that no token joins to its neighbours.
_BORDER = "☺"


def describe_formats() -> str:
    """Return the marker tokens of each known fill-in-the-middle format in one line, for error messages."""
    return ", or ".join(" ".join(_markers(parts)) for parts, _ in _FORMATS)


def _markers(parts: Sequence[str]) -> Iterator[str]:
    return (part for part in parts if part not in (_PREFIX, _SUFFIX))


@dataclass(frozen=True, kw_only=True, slots=True)
class FillInMiddle:
    """Prompt format of one tokenizer for filling in the middle.

    parts: token ids of the markers, and "prefix" and "suffix" in place of the texts, in the order of the prompt.
    marker_ids: the markers by id. No text may contain these tokens.
    end_ids: tokens at which a completion ends, the markers among them.
    """

    parts: tuple[int | str, ...]
    marker_ids: dict[int, str]
    end_ids: tuple[int, ...]

    def join(self, prefix_ids: Sequence[int], suffix_ids: Sequence[int]) -> list[int]:
        """Return the token ids of the prompt for the gap between two texts, without a BOS token."""
        texts = {_PREFIX: prefix_ids, _SUFFIX: suffix_ids}
        return [i for part in self.parts for i in (texts[part] if isinstance(part, str) else (part,))]


def find_fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """Return the first format whose markers are all tokens of the tokenizer; None if there is no such format."""
    for parts, ends in _FORMATS:
        found = {name: tokenizer.find_token(name) for name in (*_markers(parts), *ends)}
        marker_ids = {token_id: name for name in _markers(parts) if (token_id := found[name]) is not None}
        if len(marker_ids) < len(list(_markers(parts))):
            continue
        return FillInMiddle(
            parts=tuple(part if token_id is None else token_id for part in parts for token_id in [found.get(part)]),
            marker_ids=marker_ids,
            end_ids=tuple(token_id for token_id in found.values() if token_id is not None),
        )
    return None


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that follows other text: without the space that the tokenizer puts first.

    Llama's tokenizer puts a space before every text. Its authors cut this space from a suffix in the same way.
    Raises TokenizerError.
    """
    token_ids = tokenizer.encode(text)
    written = b"".join(map(tokenizer.token_bytes, token_ids))
    if written != b" " + text.encode("utf-8", "replace"):
        return token_ids
    border_ids = tokenizer.encode(_BORDER)
    joined_ids = tokenizer.encode(_BORDER + text)
    return joined_ids[len(border_ids) :] if joined_ids[: len(border_ids)] == border_ids else token_ids
