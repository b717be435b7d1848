"""Program that prints results of litellm as JSON: completions, chat, usage, embeddings and exceptions.

Arguments: URL of a service, URL of a full service that requires an API key, model name, API key.
"""

import json
import sys
from collections.abc import Callable

import litellm

url, full_url, model, full_key = sys.argv[1:]
here, full, stranger = (
    {"api_base": f"{at}/v1", "api_key": key, "max_retries": 0}
    for at, key in ((url, "none"), (full_url, full_key), (full_url, "none"))
)
messages = [{"role": "user", "content": "Tell me a story."}]
text, chat = f"text-completion-openai/{model}", f"openai/{model}"

known_errors = (litellm.AuthenticationError, litellm.NotFoundError, litellm.BadRequestError, litellm.RateLimitError)


def error_of(call: Callable[[], object]) -> list[object]:
    try:
        return [str(call())]
    except known_errors as error:
        return [type(error).__name__, error.status_code]


pieces = litellm.text_completion(
    model=text, prompt="Once upon a time", max_tokens=20, temperature=0, stream=True, **here
)
answer = litellm.completion(chat, messages, max_tokens=20, temperature=0, **here)
said = {
    "text": "".join(piece.choices[0].text or "" for piece in pieces),
    "chat": answer.choices[0].message.content,
    "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    "vector": litellm.embedding(chat, ["Once upon a time"], **here).data[0]["embedding"],
    "errors": [
        error_of(lambda: litellm.text_completion(model="text-completion-openai/no-such-model", prompt="Once", **here)),
        error_of(lambda: litellm.completion(chat, messages, max_tokens=-1, **here)),
        error_of(lambda: litellm.completion(chat, messages, max_tokens=1, **full)),
        error_of(lambda: litellm.completion(chat, messages, **stranger)),
    ],
}
print(json.dumps(said))
