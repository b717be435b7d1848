"""Program that prints results of langchain-openai as JSON: completions, chat, usage, embeddings and exceptions.

Arguments: URL of a service, URL of a full service that requires an API key, model name, API key.
"""

import json
import sys
from collections.abc import Callable

import openai
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, full_url, model, full_key = sys.argv[1:]


def options(at: str = url, *, key: str = "none", model: str = model, max_tokens: int = 20) -> dict[str, object]:
    return {
        "base_url": f"{at}/v1",
        "api_key": key,
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "max_retries": 0,
    }


def error_of(call: Callable[[], object]) -> list[object]:
    try:
        return [str(call())]
    except openai.APIStatusError as error:  # the SDK's own, or a class of langchain's below it
        return [type(error).__name__, error.status_code]


chat = ChatOpenAI(**options()).invoke("Tell me a story.")
said = {
    "text": "".join(OpenAI(**options()).stream("Once upon a time")),
    "chat": chat.content,
    "usage": [chat.usage_metadata["input_tokens"], chat.usage_metadata["output_tokens"]],
    "vector": OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model=model, check_embedding_ctx_length=False
    ).embed_query("Once upon a time"),
    "errors": [
        error_of(lambda: OpenAI(**options(model="no-such-model")).invoke("Once")),
        error_of(lambda: ChatOpenAI(**options(max_tokens=-1)).invoke("Once")),
        error_of(lambda: ChatOpenAI(**options(full_url, key=full_key, max_tokens=1)).invoke("Once")),
        error_of(lambda: ChatOpenAI(**options(full_url)).invoke("Once")),
    ],
}
print(json.dumps(said))
