"""Export of any served tokenizer as a Hugging Face tokenizer directory, so that other tools count the same tokens.

One difference remains: `transformers` parses the name of a special token in a text as that token. The server treats
such names in a prompt as ordinary text (see `interface.Tokenizer.encode`).
"""

import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex

from model.io.files import check_is_empty, write_json, writing
from model.tokenizer.bos_eos import SPECIAL_TOKENS_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, read_tokenizer_config
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.tokenizer.tokenizer_json import (
    BYTE_LEVEL_DECODER,
    TOKENIZER_FILE,
    LibraryTokenizer,
    added_token,
    pre_tokenizer_for,
    to_characters,
)

# Constructs of a split pattern that fancy-regex (tiktoken) and Oniguruma (tokenizers) read alike. Oniguruma's Ruby
# syntax differs elsewhere: `$` matches at the end of a line, `{1,3}+` is not possessive, and `(?i)` changes what `|`
# separates.
_CLASS = r"\\[pP]\{(?:L|N|M|P|S|Lu|Ll|Lt|Lm|Lo)\}|\\[sSrnt]"
_PLAIN = r"[A-Za-z0-9 '\"/_=<>,;:@#%!`]|\\[.\-/\\\[\](){}|?*+^$'\"]"
_PORTABLE = regex.compile(
    rf"""(?:
        \(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)       # contractions, ignoring case: only these exact ones
      | \(\?i:\[sdmt\]\|ll\|ve\|re\)
      | \(\?:  |  \(\?!\\S\)  |  \((?!\?)  |  \)  |  \|  |  \\z
      | (?:{_CLASS}|{_PLAIN})
      | \[\^?(?:{_CLASS}|[A-Za-z0-9]-[A-Za-z0-9]|{_PLAIN})+\]
      | [?*+][?+]?(?![?*+{{])                        # greedy, lazy or possessive
      | \{{\d+(?:,\d*)?\}}(?![?*+{{])                # greedy only
    )*""",
    regex.VERBOSE,
)


def export_tokenizer(tokenizer: Tokenizer, source: Path, out: Path) -> list[Path]:
    """Write the tokenizer and chat template of the checkpoint `source` to the empty directory `out`.

    Return the paths of the written files.

    Raises:
        TokenizerError: the tokenizer has no equivalent in Hugging Face's format.
        CheckpointError: `out` is not empty or cannot be written.
    """
    check_is_empty(out)
    if isinstance(tokenizer, LibraryTokenizer):
        values = json.loads(tokenizer.to_json())
    else:
        assert isinstance(tokenizer, ByteLevelTokenizer)
        values = _from_ranks(tokenizer)
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    bos = None if tokenizer.bos_token_id is None else names[tokenizer.bos_token_id]
    eos = next((names[token_id] for token_id in tokenizer.eos_token_ids if token_id in names), None)
    values["post_processor"] = None if bos is None else _bos_template(bos, tokenizer.special_tokens[bos])
    roles = {role: name for role, name in (("bos_token", bos), ("eos_token", eos)) if name is not None}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    if (template := read_tokenizer_config(source).chat_template) is not None:
        config["chat_template"] = template
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / TOKENIZER_FILE).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        write_json(out / SPECIAL_TOKENS_FILE, roles)
        write_json(out / TOKENIZER_CONFIG_FILE, config)
        if (source / TEMPLATE_FILE).is_file():
            shutil.copyfile(source / TEMPLATE_FILE, out / TEMPLATE_FILE)
    return sorted(out.iterdir())


def pattern_for_oniguruma(pattern: str) -> str | None:
    """Translate a split pattern from tiktoken's regex syntax to that of `tokenizers`; None if meanings may differ."""
    # A possessive `{m,n}+` at the end of an alternative may be greedy: no later element could make it backtrack.
    greedy = regex.sub(r"(\{\d+(?:,\d*)?\})\+(?=\||\)|$)", r"\1", pattern)
    translated = regex.sub(r"(?<!\\)\$(?=\||\)|$)", r"\\z", greedy)
    return translated if _PORTABLE.fullmatch(translated) else None


def _bos_template(name: str, token_id: int) -> dict[str, Any]:
    """Return the `post_processor` object of a tokenizer.json that puts the BOS token before a text."""
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": part, "type_id": index}} for index, part in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def _from_ranks(tokenizer: ByteLevelTokenizer) -> dict[str, Any]:
    pattern = pattern_for_oniguruma(tokenizer.pattern)
    if pattern is None:
        raise TokenizerError(
            f"the tokenizer's split pattern {tokenizer.pattern!r} has no equivalent in Hugging Face's format, so the "
            "tokenizer cannot be exported; use tiktoken with tokenizer.tiktoken"
        )
    special = tokenizer.special_tokens
    tokens = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    vocabulary = {to_characters(token): tokenizer.ranks[token] for token in tokens} | dict(special)
    pairs = [_last_merge(tokenizer.ranks, token) for token in tokens if len(token) > 1]
    model = {
        "type": "BPE",
        "ignore_merges": None in pairs,  # tiktoken never splits a piece that is a token
        "vocab": vocabulary,
        "merges": [list(map(to_characters, pair)) for pair in pairs if pair is not None],
    }
    return {
        "version": "1.0",
        "added_tokens": [added_token(name, special[name]) for name in sorted(special, key=special.__getitem__)],
        "pre_tokenizer": pre_tokenizer_for(pattern),
        "decoder": BYTE_LEVEL_DECODER,
        "model": model,
    }


def _last_merge(ranks: Mapping[bytes, int], token: bytes) -> tuple[bytes, bytes] | None:
    """Return the two parts that tiktoken's BPE merges last into a token; None if merges stop with more parts left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        ranked = [(ranks.get(left + right), index) for index, (left, right) in enumerate(pairwise(parts))]
        best = min(((rank, index) for rank, index in ranked if rank is not None), default=None)
        if best is None:
            return None
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    return parts[0], parts[1]
