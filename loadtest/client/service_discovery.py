"""Discovery of a service before a load test: model id, context length and tokenized text."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from loadtest.client.sse_client import Target
from loadtest.client.workload import Passages, tales

# For a service without `/tokenize`: about the average of English in a large vocabulary.
DEFAULT_CHARS_PER_TOKEN = 4.0
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """Model id, context length if the service reports it, and a text that is cut by tokens."""

    model: str
    max_context_tokens: int | None
    passages: Passages


def discover(target: Target) -> Service:
    """Ask `/v1/models`, and `/tokenize` if it exists, for the tokens of the text from which prompts are cut.

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
    except ValueError:  # no strings, or strings that do not spell the text: use the number of tokens
        return Passages.by_ratio(text, len(text) / tokenized["count"])


def fetch_json(target: Target, path: str, payload: Any = None) -> Any:
    """Send a GET, or a POST with a payload, and decode the response.

    Raises:
        OSError: no connection; its subclass `urllib.error.HTTPError` for an error status.
    """
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(
        target.url + path, body, {"Content-Type": "application/json"} | target.authorization
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return json.load(response)
