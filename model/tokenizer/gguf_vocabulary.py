"""Tokenizer of a GGUF file, described by the values of a tokenizer.json. Torch-free.

Three models are supported: `gpt2`, byte-level BPE with merges and a named split pattern, `llama`, SentencePiece's BPE
with a score for each token, and `gemma4`, SentencePiece's BPE with merges. Source: llama-vocab.cpp of llama.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.gguf.container import GgufFile, read_gguf
from model.io.files import parsing
from model.tokenizer.bos_eos import read_gguf_config
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.tokenizer.split_patterns import GPT2_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN, TEKKEN_PATTERN
from model.tokenizer.tokenizer_json import BYTE_LEVEL_DECODER, added_token, pre_tokenizer_for, tokenizer_from_json

_MAX_TOKEN_LENGTH = 512  # the time to find all merges of a token grows with the square of its length
_NORMAL, _USER_DEFINED = 1, 4  # token types


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """Way to split a text into pieces before BPE merges, which a GGUF file names.

    before, after: patterns whose matches become pieces, before and after `pattern` is applied.
    composes: characters are composed first (NFC).
    whole_first: a piece that is a token is not built by merges.
    """

    pattern: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    composes: bool = False
    whole_first: bool = False


_GPT2, _DIGITS = _Split(pattern=GPT2_PATTERN), _Split(pattern=GPT2_PATTERN, before=(r"\p{N}",))
_LLAMA3 = _Split(pattern=LLAMA3_PATTERN, whole_first=True)
_QWEN2 = _Split(pattern=QWEN_PATTERN, composes=True)
_SPLITS: Mapping[str, _Split] = {
    **dict.fromkeys(
        ("gpt-2", "default", "phi-2", "mpt", "exaone4", "a.x-4.0", "gigachat", "jais", "mellum", "trillion"), _GPT2
    ),
    "olmo": _Split(pattern=GPT2_PATTERN, composes=True),  # GPT-NeoX's
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(pattern=LLAMA3_PATTERN)),  # smaug-bpe: SmolLM3
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), _Split(pattern=QWEN_PATTERN)),
    "hunyuan-dense": _Split(
        pattern=r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        before=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"),
    ),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _Split(pattern=r" ?[^(\s|.,!?…。，、।۔،)]+")),
    "falcon": _Split(pattern=GPT2_PATTERN, before=(r"[\p{P}$+<=>^~|`]+",), after=("[0-9][0-9][0-9]",)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4"), _Split(pattern=O200K_PATTERN)),
    "tekken": _Split(pattern=TEKKEN_PATTERN, whole_first=True),
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in the metadata of a GGUF file. Raises CheckpointError if it is malformed or not supported."""
    file = read_gguf(path)
    with parsing(path):
        tokens, types = file.strings("tokenizer.ggml.tokens"), file.numbers("tokenizer.ggml.token_type")
        types = types or [_NORMAL] * len(tokens)
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        if not tokens or len(types) != len(tokens) or len(vocabulary) != len(tokens):
            raise TokenizerError(
                f"the vocabulary has {len(tokens)} tokens, {len(vocabulary)} of them distinct, and {len(types)} types; "
                "convert the model again"
            )
        match file.text("tokenizer.ggml.model"):
            case "gpt2":
                values = _byte_level_bpe(file, vocabulary, types)
            case "llama":
                values = _sentencepiece(file, vocabulary, _scored_merges(file, vocabulary, types))
            case "gemma4":
                values = _sentencepiece(file, vocabulary, _stored_merges(file, vocabulary, types))
            case kind:
                raise TokenizerError(
                    f"the tokenizer model {kind!r} is not supported; supported are gpt2, llama and gemma4; "
                    "use a file with one of these"
                )
        added = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
        values["added_tokens"] = [{**added_token(tokens[i], i), "special": False} for i in added]
        return tokenizer_from_json(path, values, read_gguf_config(file))


def _byte_level_bpe(file: GgufFile, vocabulary: Mapping[str, int], types: Sequence[float]) -> dict[str, Any]:
    name = file.text("tokenizer.ggml.pre") or "default"
    if (split := _SPLITS.get(name)) is None:
        raise TokenizerError(f"tokenizer.ggml.pre: {name!r} is not supported; supported are {', '.join(_SPLITS)}")
    before, after = (
        [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns]
        for patterns in (split.before, split.after)
    )
    steps = [*before, *pre_tokenizer_for(split.pattern)["pretokenizers"], *after]
    return {
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": _stored_merges(file, vocabulary, types),
            "ignore_merges": split.whole_first,
        },
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": BYTE_LEVEL_DECODER,
    }


def _stored_merges(file: GgufFile, vocabulary: Mapping[str, int], types: Sequence[float]) -> list[str]:
    merges = file.strings("tokenizer.ggml.merges")
    if not merges and any(len(token) > 1 and types[number] == _NORMAL for token, number in vocabulary.items()):
        raise TokenizerError(
            "tokenizer.ggml.merges is missing, so texts would be cut into bytes; convert the model again"
        )
    if wrong := next((merge for merge in merges if merge.count(" ") != 1), None):
        raise TokenizerError(f"expected two tokens in a merge, not {wrong!r}; convert the model again")
    return merges


def _sentencepiece(
    file: GgufFile, vocabulary: Mapping[str, int], merges: Sequence[str | tuple[str, str]]
) -> dict[str, Any]:
    unknown = file.integer("tokenizer.ggml.unknown_token_id") or 0
    prefix = file.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoder = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return {
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
            "unk_token": next((token for token, token_id in vocabulary.items() if token_id == unknown), None),
            "fuse_unk": True,
            "byte_fallback": True,
        },
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces] if prefix else [spaces],
        },
        "decoder": {"type": "Sequence", "decoders": decoder},
    }


def _scored_merges(file: GgufFile, vocabulary: Mapping[str, int], types: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose texts join to a token: BPE merges, by falling score of the joined token.

    Equal scores are in the order of the transformers library.
    """
    all_scores = file.numbers("tokenizer.ggml.scores")
    if len(all_scores) != len(vocabulary):
        raise TokenizerError(f"{len(all_scores)} scores for {len(vocabulary)} tokens; convert the model again")
    if longest := next((token for token in vocabulary if len(token) > _MAX_TOKEN_LENGTH), None):
        raise TokenizerError(
            f"the token {longest[:40]!r}… has over {_MAX_TOKEN_LENGTH} characters; use another tokenizer"
        )
    scores = {token: all_scores[i] for token, i in vocabulary.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    pairs = [
        (score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2]), vocabulary[pair[1]], vocabulary[pair[2]]))
    return [(left, right) for _, left, right in pairs]
