"""Tokenizer routes: `/tokenize`, `/detokenize` and `/tokenizer_info`."""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from service.http.request_io import json_response, read_body
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS, RequestProcessor
from service.preprocess.served_model import ServedModel
from service.protocol.chat import TokenizeRequest
from service.protocol.completions import DetokenizeRequest, parse_body
from service.protocol.logprobs import format_token_name
from service.protocol.responses import Detokenized, Tokenized, TokenizerInfo


class TokenizerRoutes:
    """Handlers of the tokenizer routes, which need no engine.

    Args:
        chat: renders and tokenizes conversations.
    """

    def __init__(
        self, served: ServedModel, *, processor: RequestProcessor, chat: ChatPrompts, max_body_bytes: int
    ) -> None:
        self._served = served
        self._tokenizer = served.tokenizer
        self._processor = processor
        self._chat = chat
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        """Handle `POST /tokenize`."""
        asked = parse_body(TokenizeRequest, await read_body(request, max_bytes=self._max_body_bytes))
        self._processor.check_model(asked.model)
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
        answer = Tokenized(count=len(token_ids), max_model_len=self._served.max_context_length, tokens=token_ids)
        if asked.return_token_strs:
            answer.token_strs = [format_token_name(self._tokenizer, token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Handle `POST /detokenize`."""
        asked = parse_body(DetokenizeRequest, await read_body(request, max_bytes=self._max_body_bytes))
        self._processor.check_model(asked.model)
        self._processor.check_ids(asked.tokens, "tokens")
        decode = self._tokenizer.decode
        is_long = len(asked.tokens) > MAX_INLINE_CHARACTERS
        text = await asyncio.to_thread(decode, asked.tokens) if is_long else decode(asked.tokens)
        return json_response(Detokenized(prompt=text))

    async def info(self) -> Response:
        """Handle `GET /tokenizer_info`: special tokens and chat template, for clients that render prompts."""
        marks, template = self._served.marks, self._served.template
        return json_response(
            TokenizerInfo(
                eos_token=marks.get("eos_token"),
                bos_token=marks.get("bos_token"),
                pad_token=marks.get("pad_token"),
                chat_template=None if template is None else template.source,
            )
        )

    async def _encode(self, text: str, *, begin: bool) -> list[int]:
        if len(text) > MAX_INLINE_CHARACTERS:
            return await asyncio.to_thread(self._processor.encode, text, begin=begin)
        return self._processor.encode(text, begin=begin)
