"""Conversion of chat conversations into prompt token ids."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from model.chat.special_token_escaping import ForbiddenText, SpecialTokenEscaper
from model.chat.template import ChatTemplate, cut_at_continuation, mark_continuation
from model.chat.template_sandbox import TemplateFailure
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.preprocess.template_process import TemplateProcess
from service.protocol.chat import Message
from service.protocol.errors import EngineFailed, InvalidRequest
from service.sandbox.serial_executor import SerialExecutor

# Longest wait of a conversation for the template process. Rendering takes milliseconds, but a template that hangs takes
# up to the CPU time limit of `TEMPLATE_LIMITS`.
WAIT_SECONDS = 5.0


class ChatPrompts:
    """Converter of chat conversations into prompt token ids, one conversation at a time, in a thread.

    Args:
        template: chat template of the server; None: every conversation is rejected.
        max_waiting: maximum number of conversations that wait for the thread; others are rejected.
        wait_seconds: maximum wait of a conversation for the thread, after which it is rejected.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        *,
        max_waiting: int = 256,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._escaper = SpecialTokenEscaper(tokenizer)
        self._process = TemplateProcess("" if template is None else template.source)
        self._executor = SerialExecutor(
            "conversations", "the chat template", max_waiting=max_waiting, wait_seconds=wait_seconds
        )

    async def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        more: Mapping[str, Any] | None,
        add_special_tokens: bool = False,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the prompt token ids of a conversation.

        Args:
            add_generation_prompt: end the prompt with the header of an assistant message.
            more: additional template variables from the client.
            add_special_tokens: begin with the begin-of-text token, unless the template has written one.
            continue_final_message: end the prompt with the content of the final message.

        Raises:
            InvalidRequest: the server has no template, or the template or tokenizer rejects the conversation.
            EngineFailed: the template failed, and the client passed no variables that may be the cause.
            Overloaded: too many conversations wait for the thread, or this conversation waited too long.
        """
        if self._template is None:
            raise InvalidRequest(
                "this server has no chat template (--chat-template none); use /v1/completions", param="messages"
            )
        variables = self._template.variables(
            [message.for_template() for message in messages], add_generation_prompt=add_generation_prompt
        )
        more = more or {}
        if taken := [name for name in more if name in variables]:
            raise InvalidRequest(
                f"chat_template_kwargs: the variable {taken[0]} is set by the server; leave it out",
                param="chat_template_kwargs",
            )
        ids = await self._executor.run(partial(self._encode, variables, more, continues=continue_final_message))
        begin = self._tokenizer.bos_token_id
        return [begin, *ids] if add_special_tokens and begin is not None and ids[:1] != [begin] else ids

    def close(self) -> None:
        self._executor.close()
        self._process.close()

    def _encode(self, variables: Mapping[str, Any], more: Mapping[str, Any], *, continues: bool) -> list[int]:
        try:
            (*messages, extra), breaker = self._escaper.escape([*variables["messages"], more])
            if continues:
                messages = mark_continuation(messages)
            text = self._process.render({**variables, "messages": messages, **extra})
            if continues:
                text = cut_at_continuation(text)
            return self._escaper.encode(text, breaker)
        except TemplateFailure as failure:
            if failure.by_template:
                raise InvalidRequest(f"the chat template rejects the messages: {failure}", param="messages") from None
            if more:  # most likely a value has a type that the template does not expect
                message = f"the chat template fails with the variables in chat_template_kwargs: {failure}"
                raise InvalidRequest(message, param="chat_template_kwargs") from None
            raise EngineFailed(f"the model's chat template failed: {failure}", retry=False) from None
        except (ForbiddenText, TokenizerError) as error:
            raise InvalidRequest(str(error), param="messages") from None
