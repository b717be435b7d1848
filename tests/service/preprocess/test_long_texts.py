"""Tokenization of long texts in a thread, so that streams do not wait."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from model.tokenizer.byte_level import ByteLevelTokenizer
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS

SHORT, LONG = "abc", "abc " * MAX_INLINE_CHARACTERS


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 8}),
        ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 8}),
        ("/tokenize", {"prompt": LONG}),
    ],
)
def test_short_requests_complete_while_a_long_text_is_tokenized(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str, fields: dict[str, Any]
) -> None:
    """Tokenization of the long text blocks until the response to a short request is complete."""
    began, go_on = threading.Event(), threading.Event()
    encode = ByteLevelTokenizer.encode

    def slowly(self: ByteLevelTokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if len(text) > MAX_INLINE_CHARACTERS:
            began.set()
            assert go_on.wait(60)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(ByteLevelTokenizer, "encode", slowly)

    async def run() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as both:
            long = asyncio.create_task(both.post(route, json=fields))
            assert await asyncio.to_thread(began.wait, 60), long.result().text if long.done() else "it waits"
            short = await both.post("/v1/completions", json={"prompt": SHORT, "stream": True})
            go_on.set()
            return await long, short

    long, short = asyncio.run(run())
    assert short.text.endswith("data: [DONE]\n\n")
    assert long.status_code == 200, long.text
