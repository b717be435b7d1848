"""From a conversation to the token ids of a prompt: template, control marks, tokenizer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from model.chat_template import ChatTemplate
from model.control_marks import ControlMarks, ForbiddenText
from model.template_sandbox import TemplateFailure
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.chat_schemas import Message
from service.errors import EngineFailed, InvalidRequest
from service.template_process import TemplateProcess
from service.turns import Turns

# How long a conversation may wait while others are rendered. Rendering takes milliseconds; a template that hangs takes
# the processor time it may (`template_process.Limits`), and who waits for a crowd of those is told to come back.
WAIT_SECONDS = 5.0


class ChatPrompts:
    """Makes prompts of conversations, one at a time, in a thread.

    Args:
        template: None where this server serves no conversations.
        max_waiting: conversations that may wait for their turn.
        wait_seconds: how long each may.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        *,
        max_waiting: int = 256,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._marks = ControlMarks(tokenizer)
        self._process = None if template is None else TemplateProcess(template.source)
        # The template's process does one at a time, and a slow template must not hold every thread there is.
        self._turns = Turns("conversations", "the chat template", max_waiting=max_waiting, wait_seconds=wait_seconds)

    async def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        more: Mapping[str, Any] | None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            add_generation_prompt: end with what begins an assistant's message.
            more: further variables of the template.
            add_special_tokens: begin with the mark that begins a text, where the template has not.

        Raises:
            InvalidRequest: no conversations are served, the template refused, or the text is beyond the tokenizer.
            EngineFailed: the template failed.
            Overloaded: too many conversations wait for their turn, or this one did for too long.
        """
        if self.template is None:
            raise InvalidRequest(
                "this server has no chat template (--chat-template none); use /v1/completions", param="messages"
            )
        variables = self.template.variables(
            [message.for_template() for message in messages], add_generation_prompt=add_generation_prompt
        )
        more = {} if more is None else more
        if taken := [name for name in more if name in variables]:
            raise InvalidRequest(f"chat_template_kwargs: {taken[0]} is not yours to set", param="chat_template_kwargs")
        ids = await self._turns.run(partial(self._encode, variables, more))
        begin = self._tokenizer.bos_token_id
        if add_special_tokens and begin is not None and ids[:1] != [begin]:
            ids.insert(0, begin)
        return ids

    def close(self) -> None:
        """End thread and process."""
        self._turns.close()
        if self._process is not None:
            self._process.close()

    def _encode(self, variables: Mapping[str, Any], more: Mapping[str, Any]) -> list[int]:
        assert self._process is not None
        try:
            (*messages, told), breaker = self._marks.shield([*variables["messages"], more])
            text = self._process.render({**variables, "messages": messages, **told})
            return self._marks.encode(text, breaker)
        except TemplateFailure as failure:
            if failure.by_template:
                raise InvalidRequest(f"the chat template refuses: {failure}", param="messages") from None
            if more:  # most likely a value of a type that the template does not expect
                message = f"the chat template fails with chat_template_kwargs: {failure}"
                raise InvalidRequest(message, param="chat_template_kwargs") from None
            raise EngineFailed(f"the model's chat template failed: {failure}", retry=False) from None
        except (ForbiddenText, TokenizerError) as error:
            raise InvalidRequest(str(error), param="messages") from None
