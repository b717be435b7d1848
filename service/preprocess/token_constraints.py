"""Translation of a request's token rules (penalties, biases, allowed tokens, bad words) into sampling parameters.

A bad word is forbidden as the token sequences of the word with and without a leading space, as in vLLM. The two often
differ: the first occurs within a text, the second at its beginning. Other tokenizations of the same letters are not
forbidden.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.protocol.completions import GenerationRequest
from service.protocol.errors import InvalidRequest

_LONGEST_ID = 19  # digits; no vocabulary has longer ids


def token_rules(request: GenerationRequest, tokenizer: Tokenizer, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that concern single tokens.

    Raises:
        InvalidRequest: a key of logit_bias is not a token id, or a bad word cannot be tokenized.
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
    """Return the bias per token id, which is added to the token's logit.

    Raises:
        InvalidRequest: a key is not a token id as a string.
    """
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        # Only the canonical decimal form is accepted, lest two keys name the same token.
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID and str(int(key)) == key):
            raise InvalidRequest(
                f'logit_bias: {key[:50]!r} is not a token id; write {{"id": bias}}, as in {{"42": -100}}',
                param="logit_bias",
            )
        biases[int(key)] = bias
    return biases


def check_possible(params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
    """Reject a request if the token rules forbid every first token. A later dead end only ends the completion.

    Raises:
        InvalidRequest: every allowed token is forbidden by another rule.
    """
    if not params.allowed_token_ids or not params.max_tokens:
        return
    forbidden = {word[0] for word in params.bad_word_ids if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: all of these tokens are forbidden by bad_words, or would end the text before "
            "min_tokens; allow another token",
            param="allowed_token_ids",
        )


def _bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of all words, without duplicates."""
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
