"""Special tokens of a checkpoint, from the JSON files beside a Hugging Face tokenizer or a GGUF file's metadata."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.gguf.container import GgufFile, is_gguf, read_gguf
from model.io.files import CheckpointError, parsing, read_json
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE, read_generation_config, token_ids
from model.tokenizer.interface import TokenizerError

CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_GGUF_SPECIAL, _GGUF_VISIBLE = (2, 3), 4  # token types: unknown and control; user-defined
# Special tokens that end a turn of a conversation, which files often do not list beside the EOS token.
_ENDS_OF_TURNS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>"),
)
_TOOL_RESPONSE = "<|tool_response>"  # ends a call of a tool in Gemma 4; llama.cpp's converter makes it a visible token


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Settings from tokenizer_config.json and special_tokens_map.json, or from a GGUF file's metadata.

    roles: name of a token by its key, such as bos_token, for all keys of the files that end in `_token`.
    special: names of the special tokens among `roles` and in lists such as `additional_special_tokens`; of a GGUF
        file, all special tokens.
    adds_bos, adds_eos: True if `add_bos_token` (BOS before every text) or `add_eos_token` (EOS after it) is true.
    added_tokens: entries of `added_tokens_decoder`, by id.
    tokenizer_class: the class in `transformers`; None if the files name no class.
    chat_template: the value of the key `chat_template`, unchecked; None if absent.
    eos_token_ids: ids of the EOS tokens in a GGUF file; None: `read_eos_token_ids` reads them from other files.
    """

    roles: Mapping[str, str]
    special: frozenset[str]
    adds_bos: bool
    adds_eos: bool
    added_tokens: Mapping[int, dict[str, Any]]
    tokenizer_class: str | None
    chat_template: object
    eos_token_ids: tuple[int, ...] | None = None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Read tokenizer_config.json, whose keys take precedence, and special_tokens_map.json; both may be missing.

    directory: a checkpoint directory, or a GGUF file, which has these settings in its metadata.

    Raises CheckpointError for a malformed file.
    """
    if is_gguf(directory):
        return read_gguf_config(read_gguf(directory))
    path = directory / TOKENIZER_CONFIG_FILE
    config = read_json(path, optional=True)
    values = read_json(directory / SPECIAL_TOKENS_FILE, optional=True)
    values |= {key: value for key, value in config.items() if value is not None}
    roles = {key: name for key, value in values.items() if key.endswith("_token") and (name := _token_name(value))}
    special = {roles[role] for role in _ROLES if role in roles}
    with parsing(path):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            names = values.get(key) or []
            items = names.values() if isinstance(names, dict) else names
            special |= {name for item in items if (name := _token_name(item))}
        for key in ("add_bos_token", "add_eos_token"):
            if not isinstance(config.get(key), bool | None):
                raise TokenizerError(f"the key {key} must be true or false, not {config[key]!r}; correct it")
        added = config.get("added_tokens_decoder") or {}
        return TokenizerConfig(
            roles=roles,
            special=frozenset(special),
            adds_bos=config.get("add_bos_token") is True,
            adds_eos=config.get("add_eos_token") is True,
            added_tokens={int(key): dict(entry) for key, entry in added.items()},
            tokenizer_class=config.get("tokenizer_class"),
            chat_template=config.get("chat_template"),
        )


@functools.lru_cache(maxsize=1)
def read_gguf_config(file: GgufFile) -> TokenizerConfig:
    """Return the special tokens, EOS ids and chat template in a GGUF file's metadata. Raises CheckpointError."""
    span, types = file.arrays.get("tokenizer.ggml.tokens"), file.numbers("tokenizer.ggml.token_type")
    num_tokens = 0 if span is None else span.count

    def token_id(role: str) -> int | None:
        value = file.integer(f"tokenizer.ggml.{role}_token_id")
        return value if value is not None and 0 <= value < num_tokens else None

    ids = {role: number for role in _GGUF_ROLES if (number := token_id(role)) is not None}
    kinds = types[:num_tokens]
    controls = {number for number, kind in enumerate(kinds) if kind in _GGUF_SPECIAL}
    visible = {number for number, kind in enumerate(kinds) if kind == _GGUF_VISIBLE}
    wanted = sorted({*controls, *visible, *ids.values()})
    names = dict(zip(wanted, file.strings("tokenizer.ggml.tokens", frozenset(wanted)), strict=True))
    roles = {f"{_GGUF_ROLES[role]}_token": names[number] for role, number in ids.items()}
    ends = {number for role in ("eos", "eot", "eom") if (number := token_id(role)) is not None}
    ends |= {number for number in controls if names[number] in _ENDS_OF_TURNS}
    ends |= {number for number in visible if names[number] == _TOOL_RESPONSE}
    # Source of the defaults: llama_vocab of llama.cpp.
    is_sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    default_bos = is_sentencepiece or file.text("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3", "tekken")
    return TokenizerConfig(
        roles=roles,
        special=frozenset(names.values()),
        adds_bos=file.flag("tokenizer.ggml.add_bos_token", default=default_bos),
        adds_eos=file.flag("tokenizer.ggml.add_eos_token", default=False),
        added_tokens={},
        tokenizer_class=None,
        chat_template=file.text("tokenizer.chat_template"),
        eos_token_ids=tuple(sorted(ends)),
    )


def read_eos_token_ids(directory: Path, config: TokenizerConfig, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return the EOS token ids of a checkpoint; empty if no file defines them. Raises CheckpointError.

    Sources by precedence: a GGUF file's metadata, generation_config.json, config.json, `eos_token` of `config`.
    """
    if config.eos_token_ids is not None:
        return config.eos_token_ids
    path = directory / GENERATION_CONFIG_FILE
    ids = read_generation_config(directory).eos_token_ids
    if not ids:
        path = directory / CONFIG_FILE
        values = read_json(path, optional=True)
        try:
            ids = token_ids(values.get("eos_token_id"))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; correct the file") from error
    if not ids and (name := config.roles.get("eos_token")) is not None:
        with parsing(directory / TOKENIZER_CONFIG_FILE):
            ids = (_id_of(name, "eos_token", vocabulary),)
    known = set(vocabulary.values())
    if wrong := [token_id for token_id in ids if token_id not in known]:
        raise CheckpointError(f"{path}: eos_token_id: {wrong[0]} is not in the tokenizer's vocabulary; correct it")
    return ids


def read_bos_token_id(
    config: TokenizerConfig, post_processor: Mapping[str, Any] | None, vocabulary: Mapping[str, int]
) -> int | None:
    """Return the id of the BOS token that the server must put before every prompt; None: prompts begin without BOS.

    BOS is the token that the post-processor of tokenizer.json puts before a text. If it puts no token there, BOS is
    `bos_token` if `add_bos_token` is true. Kvasir obeys this key for every tokenizer class, transformers 4 only for
    some classes: models with this key were trained with BOS.

    Raises:
        TokenizerError: the files put two special tokens before a text, or one after it, so that a model could not
            continue the text; or the BOS token is not in the vocabulary.
    """
    begins, ends = _template(post_processor)
    name = config.roles.get("bos_token")
    if not begins and config.adds_bos and name is not None:
        begins = [name]
    if config.adds_eos:
        ends = ["eos_token"]
    if ends or len(begins) > 1:
        raise TokenizerError(
            f"the tokenizer adds special tokens {begins} before and {ends} after every text; supported are at most one "
            f"before and none after; correct post_processor, or add_eos_token in {TOKENIZER_CONFIG_FILE}"
        )
    return _id_of(begins[0], "bos_token", vocabulary) if begins else None


def _template(post_processor: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """Return the names of the special tokens that a post-processor puts before and after a single text.

    Raises TokenizerError for an unsupported post-processor.
    """
    match post_processor:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence", "processors": list(steps)}:
            found = [_template(step) for step in steps]
            return [name for begins, _ in found for name in begins], [name for _, ends in found for name in ends]
        case {"type": "TemplateProcessing", "single": list(items)}:
            names = [item.get("SpecialToken", {}).get("id") for item in items]
            text = names.index(None) if None in names else len(names)
            return [str(name) for name in names[:text]], [str(name) for name in names[text + 1 :]]
        case {"type": "RobertaProcessing" | "BertProcessing", "cls": [str(begin), *_], "sep": [str(end), *_]}:
            return [begin], [end]
    raise TokenizerError(
        f"post_processor {post_processor.get('type')!r} of tokenizer.json is not supported; use TemplateProcessing"
    )


def _token_name(value: object) -> str | None:
    """Return the name of a token, written as a string or as an object with `content`; None for any other value."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) and name else None


def _id_of(name: str, role: str, vocabulary: Mapping[str, int]) -> int:
    if name not in vocabulary:
        raise TokenizerError(f"{role} {name!r} is not in the tokenizer's vocabulary; correct {TOKENIZER_CONFIG_FILE}")
    return vocabulary[name]
