"""Program that prints results of openai as JSON: completions, chat, usage, embeddings and exceptions.

Arguments: URL of a service, URL of a full service that requires an API key, model name, API key.
"""

import json
import sys
from collections.abc import Callable

import openai

url, full_url, model, full_key = sys.argv[1:]
client, full, stranger = (
    openai.OpenAI(base_url=f"{at}/v1", api_key=key, max_retries=0)
    for at, key in ((url, "none"), (full_url, full_key), (full_url, "none"))
)
messages = [{"role": "user", "content": "Tell me a story."}]


def error_of(call: Callable[[], object]) -> list[object]:
    try:
        return [str(call())]
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code]


stream = client.completions.create(model=model, prompt="Once upon a time", max_tokens=20, temperature=0, stream=True)
chat = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0)
said = {
    "text": "".join(chunk.choices[0].text for chunk in stream),
    "chat": chat.choices[0].message.content,
    "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
    "vector": client.embeddings.create(model=model, input=["Once upon a time"]).data[0].embedding,
    "models": [card.id for card in full.models.list()],
    "errors": [
        error_of(lambda: client.completions.create(model="no-such-model", prompt="Once")),
        error_of(lambda: client.completions.create(model=model, prompt="Once", max_tokens=-1)),
        error_of(lambda: full.chat.completions.create(model=model, messages=messages, max_tokens=1)),
        error_of(lambda: stranger.models.list()),
    ],
}
print(json.dumps(said))
