"""Program that prints results of anthropic as JSON: a message, whole and streamed, usage, models and exceptions.

Arguments: URL of a service, URL of a full service that requires an API key, model name, API key.
"""

import json
import sys
from collections.abc import Callable

import anthropic

url, full_url, model, full_key = sys.argv[1:]
client, full, stranger = (
    anthropic.Anthropic(base_url=at, api_key=key, max_retries=0)
    for at, key in ((url, "none"), (full_url, full_key), (full_url, "none"))
)
messages = [{"role": "user", "content": "Tell me a story."}]
asked = {"model": model, "messages": messages, "max_tokens": 20, "extra_body": {"temperature": 0}}


def error_of(call: Callable[[], object]) -> list[object]:
    try:
        return [str(call())]
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code]


whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    streamed = "".join(stream.text_stream)
num_tokens = client.messages.count_tokens(model=model, messages=messages).input_tokens
said = {
    "text": streamed,
    "chat": whole.content[0].text,
    "usage": [num_tokens, whole.usage.output_tokens],
    "num_input_tokens": whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
    "models": [card.id for card in full.models.list()],
    "errors": [
        error_of(lambda: client.messages.create(**{**asked, "model": "no-such-model"})),
        error_of(lambda: client.messages.create(**{**asked, "max_tokens": -1})),
        error_of(lambda: full.messages.create(**{**asked, "max_tokens": 1})),
        error_of(lambda: stranger.models.list()),
    ],
}
print(json.dumps(said))
