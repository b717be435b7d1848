"""Invalid bodies for `/v1/completions`, each with the status of the response and a part of its error message."""

import json
from typing import Any

CONTEXT = 256
VOCABULARY = 274


def _json(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", **fields}).encode()


BAD_REQUESTS: list[tuple[bytes, int, str]] = [
    (b"", 400, "the body is not valid JSON: EOF"),
    (b"{", 400, "not valid JSON"),
    (b"\x00\xff", 400, "not valid JSON"),
    (b'{"prompt": "a"', 400, "not valid JSON"),
    (b'{"prompt": ' + b"[" * 10_000, 400, "not valid JSON"),
    (b'{"prompt": ' + b"[" * 50_000, 400, "the JSON body holds over 20000 lists and objects"),
    (b"[]", 400, "JSON object"),
    (b"{}", 400, "prompt is required"),
    (_json(prompt=None), 400, "prompt must be"),
    (_json(prompt=7), 400, "prompt must be"),
    (_json(prompt={"a": 1}), 400, "prompt must be"),
    (_json(prompt=["a", 1]), 400, "prompt must be"),
    (_json(prompt=[[1], "a"]), 400, "prompt must be"),
    (_json(prompt=[True]), 400, "prompt must be"),
    (_json(prompt=""), 400, "must not be empty"),
    (_json(prompt=[]), 400, "must not be empty"),
    (_json(prompt=[[]]), 400, "must not be empty"),
    (_json(prompt=["a", ""]), 400, "must not be empty"),
    (_json(prompt=[VOCABULARY]), 400, "out of vocabulary"),
    (_json(prompt=[[1], [-1]]), 400, "out of vocabulary"),
    (_json(prompt=[1] * CONTEXT), 400, f"context length is {CONTEXT} tokens, but the prompt has {CONTEXT} tokens"),
    (_json(prompt="a" * 2000), 400, "context"),
    (_json(prompt="a" * 1_500_000), 400, "context"),
    (_json(max_tokens=CONTEXT), 400, f"the prompt has 1 tokens and max_tokens is {CONTEXT}"),
    (_json(max_tokens=-1), 400, "max_tokens"),
    (_json(max_tokens="5"), 400, "max_tokens"),
    (_json(max_tokens=1.5), 400, "max_tokens"),
    (_json(max_tokens=5, min_tokens=6), 400, "min_tokens"),
    (_json(temperature=-1), 400, "temperature"),
    (_json(temperature=3), 400, "temperature"),
    (_json(temperature="hot"), 400, "temperature"),
    (_json(top_p=0), 400, "top_p"),
    (_json(top_p=1.01), 400, "top_p"),
    (_json(top_k=-5), 400, "top_k"),
    (_json(min_p=-0.5), 400, "min_p"),
    (_json(n=0), 400, "n must be"),
    (_json(n=129), 400, "n must be"),
    (_json(logprobs=21), 400, "logprobs"),
    (_json(logprobs=-1), 400, "logprobs"),
    (_json(prompt_logprobs=21), 400, "prompt_logprobs must"),
    (_json(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens must"),
    (_json(truncate_prompt_tokens=CONTEXT), 400, f"truncate_prompt_tokens={CONTEXT} is over the {CONTEXT - 16} tokens"),
    (_json(truncation_side="left"), 400, "needs truncate_prompt_tokens"),
    (_json(seed="x"), 400, "seed"),
    (_json(stop=""), 400, "stop must be"),
    (_json(stop=["a"] * 17), 400, "stop must be"),
    (_json(stop="a" * 1001), 400, "stop must"),
    (_json(stop_token_ids=[1] * 129), 400, "stop_token_ids must"),
    (_json(stop_token_ids=[VOCABULARY]), 400, "out of vocabulary"),
    (_json(stream="yes"), 400, "stream"),
    (_json(stream_options={"include_usage": True}), 400, "stream_options"),
    (_json(best_of=2, stream=True), 400, "best_of=2 cannot be streamed"),
    (_json(best_of=2, n=3), 400, "best_of=2 is under n=3"),
    (_json(logit_bias={"a": 5}), 400, "logit_bias: 'a' is not a token id"),
    (_json(logit_bias={str(VOCABULARY): 5}), 400, "out of vocabulary"),
    (_json(allowed_token_ids=[VOCABULARY]), 400, "out of vocabulary"),
    (_json(allowed_token_ids=[97], bad_words=["a"]), 400, "all of these tokens are forbidden"),
    (_json(suffix="b"), 400, "suffix needs a tokenizer with the tokens <|fim_prefix|>"),
    (_json(presence_penalty=3), 400, "presence_penalty must"),
    (_json(response_format={"type": "json_schema"}), 400, "json_schema is required with type json_schema"),
    (_json(unheard_of=1), 400, "unknown field: unheard_of"),
    (_json(model="gpt-4"), 404, "does not exist"),
    (_json(user="x" * 10_000_000), 413, "over the limit"),
]
