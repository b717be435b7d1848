"""Tokenizer routes: `/tokenize`, `/detokenize` and `/tokenizer_info`."""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from service.chat import ChatPrompts
from service.chat_schemas import TokenizeRequest
from service.logprobs import token_name
from service.plan import LONG_TEXT, Planner
from service.requests import json_response, read_body
from service.responses import Detokenized, Tokenized, TokenizerInfo
from service.schemas import DetokenizeRequest, parse_body
from service.serving import Serving


class TokenizerRoutes:
    """Handlers of the tokenizer routes, which need no engine.

    Args:
        chat: renders and tokenizes conversations.
    """

    def __init__(self, serving: Serving, *, planner: Planner, chat: ChatPrompts, max_body_bytes: int) -> None:
        self._serving = serving
        self._tokenizer = serving.tokenizer
        self._planner = planner
        self._chat = chat
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        """Handle `POST /tokenize`."""
        asked = parse_body(TokenizeRequest, await read_body(request, max_bytes=self._max_body_bytes))
        self._planner.check_model(asked.model)
        match asked.subject():
            case str() as text if asked.add_special_tokens is False and text in self._tokenizer.special_tokens:
                # lm-evaluation-harness asks this way for the id of a special token that it got from /tokenizer_info.
                token_ids = [self._tokenizer.special_tokens[text]]
            case str() as text:
                token_ids = await self._encode(text, begin=asked.add_special_tokens is not False)
            case messages:
                token_ids = await self._chat.encode(
                    messages,
                    add_generation_prompt=asked.add_generation_prompt is not False,
                    more=asked.chat_template_kwargs,
                    add_special_tokens=asked.add_special_tokens is True,
                )
        answer = Tokenized(count=len(token_ids), max_model_len=self._serving.max_context_length, tokens=token_ids)
        if asked.return_token_strs:
            answer.token_strs = [token_name(self._tokenizer, token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Handle `POST /detokenize`."""
        asked = parse_body(DetokenizeRequest, await read_body(request, max_bytes=self._max_body_bytes))
        self._planner.check_model(asked.model)
        self._planner.check_ids(asked.tokens, "tokens")
        decode = self._tokenizer.decode
        is_long = len(asked.tokens) > LONG_TEXT
        text = await asyncio.to_thread(decode, asked.tokens) if is_long else decode(asked.tokens)
        return json_response(Detokenized(prompt=text))

    async def info(self) -> Response:
        """Handle `GET /tokenizer_info`: special tokens and chat template, for clients that render prompts."""
        marks, template = self._serving.marks, self._serving.template
        return json_response(
            TokenizerInfo(
                eos_token=marks.get("eos_token"),
                bos_token=marks.get("bos_token"),
                pad_token=marks.get("pad_token"),
                chat_template=None if template is None else template.source,
            )
        )

    async def _encode(self, text: str, *, begin: bool) -> list[int]:
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._planner.encode, text, begin=begin)
        return self._planner.encode(text, begin=begin)
