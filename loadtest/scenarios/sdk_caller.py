"""User of OpenAI's Python SDK at an overloaded service: errors it sees, and rejections that the SDK's retries hide.

    KVASIR_API_KEY=... python -m loadtest.scenarios.sdk_caller http://127.0.0.1:8000 SECONDS MAX_RETRIES

Sends streamed completions one after the other, in a separate process, so that it waits for no other client. Prints
JSON. errors: exceptions that the caller saw, by name. refusals: responses of 4xx and 5xx that the caller did not see.
tokens_per_second: chunks with text; each is a token unless text was held back.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from typing import Any

import httpx
import openai

_PROMPT = "Once upon a time, in a kingdom by the sea,"
_MAX_TOKENS = 16


def call(url: str, *, key: str, seconds: float, max_retries: int) -> dict[str, Any]:
    """Send completions for `seconds`. Return the figures of the module docstring."""
    statuses: Counter[int] = Counter()
    errors: Counter[str] = Counter()
    ttfts: list[float] = []
    num_tokens = 0
    end = time.perf_counter() + seconds
    with httpx.Client(event_hooks={"response": [lambda response: statuses.update([response.status_code])]}) as http:
        client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=max_retries,
            http_client=http,  # type: ignore[arg-type]  # newer versions name another package with the same interface
        )
        model = client.models.list().data[0].id
        while time.perf_counter() < end:
            began = time.perf_counter()
            try:
                stream = client.completions.create(model=model, prompt=_PROMPT, max_tokens=_MAX_TOKENS, stream=True)
                first = None
                for chunk in stream:
                    first = time.perf_counter() - began if first is None else first
                    num_tokens += bool(chunk.choices and chunk.choices[0].text)
                ttfts.append(time.perf_counter() - began if first is None else first)
            except openai.OpenAIError as error:
                errors[f"{type(error).__name__}: {error}"[:120]] += 1
    ttfts.sort()
    percentiles = {f"p{p}": ttfts[min(len(ttfts) - 1, len(ttfts) * p // 100)] for p in (50, 90, 99) if ttfts}
    return {
        "max_retries": max_retries,
        "completions": len(ttfts),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "errors": dict(errors),
        "refusals": {str(status): count for status, count in sorted(statuses.items()) if status >= 400},
        "seconds_to_first_chunk": percentiles,
    }


if __name__ == "__main__":
    logging.disable(logging.INFO)
    address, duration, retries = sys.argv[1:]
    key = os.environ.get("KVASIR_API_KEY", "none")
    print(json.dumps(call(address, key=key, seconds=float(duration), max_retries=int(retries))))
