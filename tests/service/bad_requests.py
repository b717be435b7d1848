"""Invalid bodies for `/v1/completions`, each with the status of the response and a part of its error message.

tests/service/protocol/test_completions.py has the bounds and types of single fields.
"""

import json
from typing import Any

CONTEXT = 256
VOCABULARY = 274


def _json(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", **fields}).encode()


BAD_REQUESTS: list[tuple[bytes, int, str]] = [
    (b"", 400, "the body is not valid JSON: EOF"),
    (b'{"prompt": ' + b"[" * 50_000, 400, "the JSON body holds over 20000 lists and objects"),
    (b"{}", 400, "prompt is required"),
    (_json(prompt=7), 400, "prompt must be"),
    (_json(prompt=["a", ""]), 400, "must not be empty"),
    (_json(prompt=[VOCABULARY]), 400, "out of vocabulary"),
    (_json(prompt=[[1], [-1]]), 400, "out of vocabulary"),
    (_json(prompt=[1] * CONTEXT), 400, f"context length is {CONTEXT} tokens, but the prompt has {CONTEXT} tokens"),
    (_json(prompt="a" * 2000), 400, "context"),
    (_json(prompt="a" * 1_500_000), 400, "context"),
    (_json(max_tokens=CONTEXT), 400, f"the prompt has 1 tokens and max_tokens is {CONTEXT}"),
    (_json(max_tokens="5"), 400, "max_tokens"),
    (_json(max_tokens=1.5), 400, "max_tokens"),
    (_json(max_tokens=5, min_tokens=6), 400, "min_tokens"),
    (_json(top_p=1.01), 400, "top_p"),
    (_json(min_p=-0.5), 400, "min_p"),
    (_json(logprobs=-1), 400, "logprobs"),
    (_json(truncate_prompt_tokens=CONTEXT), 400, f"truncate_prompt_tokens={CONTEXT} is over the {CONTEXT - 16} tokens"),
    (_json(stop="a" * 1001), 400, "stop must"),
    (_json(stop_token_ids=[1] * 129), 400, "stop_token_ids must"),
    (_json(stop_token_ids=[VOCABULARY]), 400, "out of vocabulary"),
    (_json(logit_bias={"a": 5}), 400, "logit_bias: 'a' is not a token id"),
    (_json(logit_bias={str(VOCABULARY): 5}), 400, "out of vocabulary"),
    (_json(allowed_token_ids=[VOCABULARY]), 400, "out of vocabulary"),
    (_json(allowed_token_ids=[97], bad_words=["a"]), 400, "all of these tokens are forbidden"),
    (_json(suffix="b"), 400, "suffix needs a tokenizer with the tokens <|fim_prefix|>"),
    (_json(response_format={"type": "json_schema"}), 400, "json_schema is required with type json_schema"),
    (_json(unheard_of=1), 400, "unknown field: unheard_of"),
    (_json(model="gpt-4"), 404, "does not exist"),
    (_json(user="x" * 10_000_000), 413, "over the limit"),
]
