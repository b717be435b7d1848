"""What a client asks of a service before it loads it."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from loadtest.sse_client import Target
from loadtest.workload import Passages, tales

# For a service that does not tokenize for its clients: about what English has in a large vocabulary.
DEFAULT_CHARS_PER_TOKEN = 4.0
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """The model's id, its context where the service tells it, and a text cut by its tokens."""

    model: str
    max_context_tokens: int | None
    passages: Passages


def discover(target: Target) -> Service:
    """Ask `/v1/models`, and `/tokenize` (where there is one) for the tokens of the text that prompts are cut from.

    Raises:
        OSError: the service cannot be reached, or has no models.
    """
    listed = fetch_json(target, "/v1/models")["data"][0]
    return Service(listed["id"], listed.get("max_model_len"), _passages(target))


def _passages(target: Target) -> Passages:
    text = tales()
    try:
        tokenized = fetch_json(target, "/tokenize", {"prompt": text, "return_token_strs": True})
    except urllib.error.HTTPError:
        return Passages.by_ratio(text, DEFAULT_CHARS_PER_TOKEN)
    try:
        return Passages.by_tokens(text, tokenized.get("token_strs") or [])
    except ValueError:  # no strings, or strings that do not spell the text: only the number of tokens is of use
        return Passages.by_ratio(text, len(text) / tokenized["count"])


def fetch_json(target: Target, path: str, payload: Any = None) -> Any:
    """GET, or POST where there is a payload, and decode the answer.

    Raises:
        OSError: no connection; `urllib.error.HTTPError`, which is one, for an error status.
    """
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(
        target.url + path, body, {"Content-Type": "application/json"} | target.authorization
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return json.load(response)
