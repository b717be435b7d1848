"""Program that prints results of llama-index as JSON: completions, chat, usage and exceptions.

Arguments: URL of a service, URL of a full service that requires an API key, model name, API key.
"""

import json
import sys
from collections.abc import Callable

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, full_url, model, full_key = sys.argv[1:]
messages = [ChatMessage(role="user", content="Tell me a story.")]


def llm(
    at: str = url, *, key: str = "none", model: str = model, is_chat_model: bool = False, max_tokens: int = 20
) -> OpenAILike:
    return OpenAILike(
        api_base=f"{at}/v1",
        api_key=key,
        model=model,
        is_chat_model=is_chat_model,
        max_tokens=max_tokens,
        temperature=0,
        max_retries=0,
    )


def error_of(call: Callable[[], object]) -> list[object]:
    try:
        return [str(call())]
    except openai.APIStatusError as error:  # llama-index passes the SDK's own on
        return [type(error).__name__, error.status_code]


chat = llm(is_chat_model=True).chat(messages)
said = {
    "text": "".join(piece.delta for piece in llm().stream_complete("Once upon a time")),
    "chat": chat.message.content,
    "usage": [chat.raw.usage.prompt_tokens, chat.raw.usage.completion_tokens],
    "errors": [
        error_of(lambda: llm(model="no-such-model").complete("Once")),
        error_of(lambda: llm(max_tokens=100_000).complete("Once")),
        error_of(lambda: llm(full_url, key=full_key, is_chat_model=True, max_tokens=1).chat(messages)),
        error_of(lambda: llm(full_url).complete("Once")),
    ],
}
print(json.dumps(said))
