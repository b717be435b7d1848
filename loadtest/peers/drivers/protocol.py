"""Protocol of the drivers: JSON lines on standard input and output. Imports only the standard library.

    request  {"prompts": [[5, 17, ...], ...], "output_tokens": 128}
    driver   {"first_seconds": 0.05, "total_seconds": 0.71, "later_tokens": 2032}

A driver continues every prompt greedily by exactly `output_tokens` tokens, past end-of-text tokens. A driver whose
engine fails returns {"error": "reason"}.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

Prompts = list[list[int]]


class Wave(NamedTuple):
    """Times of one request to a driver, whose prompts run together.

    first_seconds: time until every sequence had its first token. total_seconds: time until every sequence had ended.
    later_tokens: tokens of all sequences between these two times.
    """

    first_seconds: float
    total_seconds: float
    later_tokens: int


def serve(measure: Callable[[Prompts, int], Wave]) -> None:
    """Answer each request on standard input by a call of `measure`. What libraries print goes to standard error."""
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            response: dict[str, object] = measure(request["prompts"], request["output_tokens"])._asdict()
        except Exception as error:  # every exception of a library is reported in the response
            response = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(response), file=responses)
