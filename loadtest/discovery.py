"""What a client asks of a service before it loads it."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from loadtest.sse_client import Target

# For a service that does not tokenize for its clients: about what English has in a large vocabulary.
DEFAULT_CHARS_PER_TOKEN = 4.0
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """The model's id, its context where the service tells it, and how long its tokens are."""

    model: str
    max_context_tokens: int | None
    chars_per_token: float


def discover(target: Target, sample: str) -> Service:
    """Ask `/v1/models`, and `/tokenize` (where there is one) for the tokens of a sample of the prompts' text.

    Raises:
        OSError: the service cannot be reached, or has no models.
    """
    listed = fetch_json(target, "/v1/models")["data"][0]
    try:
        tokenized = fetch_json(target, "/tokenize", {"prompt": sample})
    except urllib.error.HTTPError:
        chars_per_token = DEFAULT_CHARS_PER_TOKEN
    else:
        chars_per_token = len(sample) / tokenized["count"]
    return Service(listed["id"], listed.get("max_model_len"), chars_per_token)


def fetch_json(target: Target, path: str, payload: Any = None) -> Any:
    """GET, or POST where there is a payload, and decode the answer.

    Raises:
        OSError: no connection; `urllib.error.HTTPError`, which is one, for an error status.
    """
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(target.url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return json.load(response)
