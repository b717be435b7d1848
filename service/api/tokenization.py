"""Tokenizer routes: `/tokenize`, `/detokenize` and `/tokenizer_info`."""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from service.api.context import ApiContext
from service.http.request_io import json_response
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.protocol.chat import TokenizeRequest
from service.protocol.completions import DetokenizeRequest
from service.protocol.logprobs import format_token_name
from service.protocol.responses import Detokenized, Tokenized, TokenizerInfo


class TokenizerRoutes:
    """Handlers of the tokenizer routes, which need no engine."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._tokenizer = context.served.tokenizer

    async def tokenize(self, request: Request) -> Response:
        """Handle `POST /tokenize`."""
        asked = TokenizeRequest.parse(await self._context.read_body(request))
        processor = self._context.processor
        processor.check_model(asked.model)
        match asked.subject():
            case str() as text if asked.add_special_tokens is False and text in self._tokenizer.special_tokens:
                # lm-evaluation-harness asks this way for the id of a special token from /tokenizer_info.
                token_ids = [self._tokenizer.special_tokens[text]]
            case str() as text:
                begin = asked.add_special_tokens is not False
                if len(text) > MAX_INLINE_CHARACTERS:
                    token_ids = await asyncio.to_thread(processor.encode, text, begin=begin)
                else:
                    token_ids = processor.encode(text, begin=begin)
            case messages:
                token_ids = await self._context.chat.encode(
                    messages,
                    add_generation_prompt=asked.add_generation_prompt is not False,
                    more=asked.chat_template_kwargs,
                    add_special_tokens=asked.add_special_tokens is True,
                )
        answer = Tokenized(count=len(token_ids), max_model_len=processor.max_context_length, tokens=token_ids)
        if asked.return_token_strs:
            answer.token_strs = [format_token_name(self._tokenizer, token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Handle `POST /detokenize`."""
        asked = DetokenizeRequest.parse(await self._context.read_body(request))
        self._context.processor.check_model(asked.model)
        self._context.processor.check_ids(asked.tokens, "tokens")
        decode = self._tokenizer.decode
        is_long = len(asked.tokens) > MAX_INLINE_CHARACTERS
        text = await asyncio.to_thread(decode, asked.tokens) if is_long else decode(asked.tokens)
        return json_response(Detokenized(prompt=text))

    async def info(self) -> Response:
        """Handle `GET /tokenizer_info`: special tokens and chat template, for clients that render prompts."""
        marks, template = self._context.served.marks, self._context.served.template
        return json_response(
            TokenizerInfo(
                eos_token=marks.get("eos_token"),
                bos_token=marks.get("bos_token"),
                pad_token=marks.get("pad_token"),
                chat_template=None if template is None else template.source,
            )
        )
