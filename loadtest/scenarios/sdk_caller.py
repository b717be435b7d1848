"""User of OpenAI's Python SDK at an overloaded service: errors it sees, and rejections that the SDK's retries hide.

    KVASIR_API_KEY=... python -m loadtest.scenarios.sdk_caller --url http://127.0.0.1:8000 --seconds 300

Runs in a separate process, so that it waits for no other client. Prints JSON.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import openai

_PROMPT = "Once upon a time, in a kingdom by the sea,"


def call(url: str, *, key: str, seconds: float, max_retries: int, max_tokens: int) -> dict[str, Any]:
    """Send streamed completions one after the other for `seconds`.

    errors: exceptions that the caller saw, by name. refusals: responses of 4xx and 5xx that the caller did not see.
    tokens_per_second: chunks with text; each is a token unless text was held back.
    """
    statuses: Counter[int] = Counter()

    def count(response: httpx.Response) -> None:
        statuses[response.status_code] += 1

    errors: Counter[str] = Counter()
    ttfts: list[float] = []
    num_tokens = 0
    end = time.perf_counter() + seconds
    with httpx.Client(event_hooks={"response": [count]}) as http:
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
                stream = client.completions.create(model=model, prompt=_PROMPT, max_tokens=max_tokens, stream=True)
                first = None
                for chunk in stream:
                    first = time.perf_counter() - began if first is None else first
                    num_tokens += bool(chunk.choices and chunk.choices[0].text)
                ttfts.append(time.perf_counter() - began if first is None else first)
            except openai.OpenAIError as error:
                errors[f"{type(error).__name__}: {error}"[:120]] += 1
    ttfts.sort()
    return {
        "max_retries": max_retries,
        "completions": len(ttfts),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "errors": dict(errors),
        "refusals": {str(status): count for status, count in sorted(statuses.items()) if status >= 400},
        "seconds_to_first_chunk": {f"p{p}": ttfts[min(len(ttfts) - 1, len(ttfts) * p // 100)] for p in (50, 90, 99)}
        if ttfts
        else {},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the user and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.scenarios.sdk_caller", description=__doc__)
    add = parser.add_argument
    add("--url", required=True)
    add("--seconds", type=float, default=30.0)
    add(
        "--max-retries",
        type=int,
        default=openai.DEFAULT_MAX_RETRIES,
        help="maximum retries of the SDK (default: %(default)s, the SDK's default)",
    )
    add("--max-tokens", type=int, default=16)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    logging.disable(logging.INFO)
    figures = call(
        arguments.url,
        key=os.environ.get("KVASIR_API_KEY", "none"),
        seconds=arguments.seconds,
        max_retries=arguments.max_retries,
        max_tokens=arguments.max_tokens,
    )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
