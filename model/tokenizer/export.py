"""Export of any served tokenizer as a Hugging Face tokenizer directory, so that other tools count the same tokens.

    tokenizer.json            the checkpoint's own file if it has one, else written from ranks and pattern
    tokenizer_config.json     the special tokens, and `add_bos_token`
    special_tokens_map.json   the special tokens again

One difference remains: `transformers` parses the name of a special token in a text as that token. The server treats
such names in a prompt as ordinary text (see `interface.Tokenizer.encode`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from model.tokenizer.added_tokens import AddedToken
from model.tokenizer.alphabet import to_characters
from model.tokenizer.bos_eos import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, read_object, read_tokenizer_config
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.hugging_face import LibraryTokenizer
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.tokenizer.merges import NotEquivalentError, merges_of_ranks
from model.tokenizer.split_pattern import for_oniguruma, splitting_by
from model.tokenizer.tokenizer_json import TOKENIZER_FILE, with_all_added_tokens

CHAT_TEMPLATE_FILE = "chat_template.jinja"
_OURS = {TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE}
_SIGNATURE = {"exported_by": "kvasir"}


def export_tokenizer(tokenizer: Tokenizer, source: Path, out: Path) -> list[Path]:
    """Write the tokenizer of the checkpoint directory `source` to the directory `out`. Return the files in `out`.

    Raises:
        TokenizerError: the tokenizer has no equivalent in Hugging Face's format, or `out` cannot be written, or `out`
            holds files other than an earlier export.
    """
    _check_writable(out)
    text = _tokenizer_json(tokenizer, source)
    _check_ids(text, tokenizer)
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    marks = {
        "bos_token": None if tokenizer.bos_token_id is None else names[tokenizer.bos_token_id],
        "eos_token": next((names[end] for end in tokenizer.eos_token_ids if end in names), None),
    }
    marks = {role: name for role, name in marks.items() if name is not None}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.bos_token_id is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **marks,
        **_SIGNATURE,
    }
    template = read_object(source / TOKENIZER_CONFIG_FILE, optional=True).get("chat_template")
    if template is not None:
        config["chat_template"] = template
    files = {
        TOKENIZER_FILE: text,
        SPECIAL_TOKENS_FILE: json.dumps(marks, indent=2, ensure_ascii=False) + "\n",
        TOKENIZER_CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_text(content, encoding="utf-8")
        if (source / CHAT_TEMPLATE_FILE).is_file():
            shutil.copyfile(source / CHAT_TEMPLATE_FILE, out / CHAT_TEMPLATE_FILE)
    except OSError as error:
        raise TokenizerError(f"{out}: {error.strerror}; choose another directory") from error
    return sorted(path for path in out.iterdir())


def _check_writable(out: Path) -> None:
    """Raise TokenizerError for a directory that holds anything but an earlier export."""
    if out.exists() and not out.is_dir():
        raise TokenizerError(f"{out}: not a directory; choose another one")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    is_export = names <= _OURS and _SIGNATURE.items() <= read_object(out / TOKENIZER_CONFIG_FILE, optional=True).items()
    if names and not is_export:
        raise TokenizerError(f"{out}: holds files other than an earlier export; choose a new or an empty directory")


def _tokenizer_json(tokenizer: Tokenizer, source: Path) -> str:
    if isinstance(tokenizer, LibraryTokenizer):
        values = json.loads(tokenizer.to_json())
    elif (source / TOKENIZER_FILE).exists():
        values = with_all_added_tokens(read_object(source / TOKENIZER_FILE), read_tokenizer_config(source))
    else:
        assert isinstance(tokenizer, ByteLevelTokenizer)
        values = _from_ranks(tokenizer)
    return json.dumps({**values, "post_processor": _post_processor(tokenizer)}, ensure_ascii=False)


def _post_processor(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the `post_processor` that puts the BOS token before a text; None without a BOS token."""
    if tokenizer.bos_token_id is None:
        return None
    name = tokenizer.format_token_name(tokenizer.bos_token_id)
    mark = {"SpecialToken": {"id": name, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [mark, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.bos_token_id], "tokens": [name]}},
    }


def _check_ids(text: str, tokenizer: Tokenizer) -> None:
    """Raise TokenizerError if a special token gets another id.

    The library assigns new ids to added tokens that are not in the vocabulary.
    """
    library = tokenizers.Tokenizer.from_str(text)
    for name, token_id in tokenizer.special_tokens.items():
        if library.token_to_id(name) != token_id:
            raise TokenizerError(
                f"the special token {name!r} would get another id than {token_id} in Hugging Face's format"
            )


def _from_ranks(tokenizer: ByteLevelTokenizer) -> dict[str, Any]:
    pattern = for_oniguruma(tokenizer.pattern)
    if pattern is None:
        raise TokenizerError(f"the pattern {tokenizer.pattern!r} has no equivalent in Hugging Face's format")
    ranked = [to_characters(token) for token in sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)]
    try:
        merges = merges_of_ranks(ranked)
    except NotEquivalentError as error:
        raise TokenizerError(f"the ranks have no equivalent list of merges: {error}") from error
    marks = [AddedToken.mark(name, number) for name, number in tokenizer.special_tokens.items()]
    every_token = ((tokenizer.token_bytes(token_id), token_id) for token_id in range(tokenizer.vocab_size))
    vocabulary = {to_characters(token): token_id for token, token_id in every_token if token}
    vocabulary |= {mark.content: mark.id for mark in marks}  # keeps their ids, even after a gap
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": mark.id, "content": mark.content, **flags} for mark in sorted(marks, key=lambda m: m.id)
        ],
        "normalizer": None if tokenizer.preparation.normalize is None else {"type": "NFC"},
        "pre_tokenizer": splitting_by(pattern),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": bool(merges.whole_pieces),  # tiktoken never splits a piece that is a token
            "vocab": vocabulary,
            "merges": merges.pairs,
        },
    }
