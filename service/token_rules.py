"""What a request says of single tokens, as the engine is told it: token ids, checked.

A forbidden word is forbidden as the tokens that the tokenizer makes of it, with a space before it and without, as vLLM
does: a word is one sequence of tokens at the beginning of a text, and often another within. The same letters in other
tokens are not caught.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from model.sampling_params import SamplingParams
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.errors import InvalidRequest
from service.schemas import GenerationRequest

_LONGEST_ID = 19  # digits; what is longer is no id of any vocabulary


def token_rules(request: GenerationRequest, tokenizer: Tokenizer, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that speak of single tokens.

    Raises:
        InvalidRequest: an id is none, or a word cannot be tokenized.
    """
    return {
        "presence_penalty": request.value("presence_penalty"),
        "frequency_penalty": request.value("frequency_penalty"),
        "repetition_penalty": request.value("repetition_penalty", defaults),
        "logit_bias": tuple(logit_bias(request).items()),
        "allowed_token_ids": tuple(dict.fromkeys(request.allowed_token_ids or ())),
        "bad_word_ids": _bad_word_ids(request.bad_words or (), tokenizer),
    }


def logit_bias(request: GenerationRequest) -> dict[int, float]:
    """What is added to each token's logit.

    Raises:
        InvalidRequest: a key is not a token id as a string.
    """
    return {_id(key): bias for key, bias in (request.logit_bias or {}).items()}


def check_possible(params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
    """Refuse a request of which no completion could begin. One that leaves no token later ends there.

    Raises:
        InvalidRequest: every token that may come is forbidden.
    """
    if not params.allowed_token_ids or not params.max_tokens:
        return
    forbidden = {word[0] for word in params.bad_word_ids if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: every one of them is forbidden by bad_words, or would end the text before min_tokens; "
            "allow another token",
            param="allowed_token_ids",
        )


def _id(key: str) -> int:
    # One way to write an id: two would name a token twice.
    if key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID and str(int(key)) == key:
        return int(key)
    raise InvalidRequest(
        f'logit_bias: {key[:50]!r} is no token id; write {{"id": bias}}, as in {{"42": -100}}', param="logit_bias"
    )


def _bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's token sequences, every one once."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare.strip() else (word,):
            try:
                ids = tuple(tokenizer.encode(text))
            except TokenizerError as error:
                raise InvalidRequest(f"bad_words: {word!r}: {error}", param="bad_words") from None
            if not ids:
                raise InvalidRequest(f"bad_words: the tokenizer makes no token of {word!r}", param="bad_words")
            found[ids] = None
    return tuple(found)
