"""Conversion of chat conversations into prompt token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from model.chat.output_parser import OutputParser
from model.chat.reasoning import begins_in_reasoning
from model.chat.special_token_escaping import ForbiddenText, SpecialTokenEscaper
from model.chat.template import ChatTemplate, cut_at_continuation, mark_continuation
from model.chat.template_sandbox import MAX_CHARACTERS, TemplateFailure
from model.chat.tool_formats.tool_format import ToolSchema
from model.chat.tool_prompt import put_tools_in_message, write_tools_as_text
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.preprocess.chat_format import ChatFormat
from service.preprocess.template_process import TemplateProcess
from service.protocol.chat import (
    ChatCompletionRequest,
    ConversationFields,
    Message,
    TokenizeRequest,
    messages_for_template,
)
from service.protocol.errors import EngineFailed, InvalidRequest
from service.protocol.response_format import OutputConstraint
from service.protocol.tools import ToolDefinition
from service.sandbox.serial_executor import SerialExecutor

# Longest wait of a conversation for the template process. Rendering takes milliseconds, but a template that hangs takes
# up to the CPU time limit of `TEMPLATE_LIMITS`.
WAIT_SECONDS = 5.0
# Limit of reasoning tokens by the field `reasoning_effort`, for templates that do not read the field themselves. Levels
# above have no limit.
_EFFORT_TOKENS = {"none": 0, "minimal": 128, "low": 1024, "medium": 4096}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPlan:
    """Chat request, prepared for the engine.

    token_ids: prompt.
    constraint: grammar of the completion: output format, tool calls and limit of reasoning tokens; None: any text.
    visible_token_ids: special tokens whose names the completion's text shows, because the parser needs them.
    new_parser: creates a parser for one completion; None: the whole completion is text.
    call_id_length: see `ToolFormat.id_length`.
    reasoning_end_id: token id of the tag that ends the reasoning, such as </think>; None if it is not one token.
    """

    token_ids: list[int]
    constraint: OutputConstraint | None = None
    visible_token_ids: tuple[int, ...] = ()
    new_parser: Callable[[], OutputParser] | None = None
    call_id_length: int | None = None
    reasoning_end_id: int | None = None


class ChatPrompts:
    """Converter of chat conversations into prompt token ids, one conversation at a time, in a thread.

    Args:
        template: chat template of the server; None: every conversation is rejected.
        form: formats of tool calls and reasoning.
        max_waiting: maximum number of conversations that wait for the thread; others are rejected.
        wait_seconds: maximum wait of a conversation for the thread, after which it is rejected.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        form: ChatFormat,
        *,
        max_waiting: int = 256,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._form = form
        self._escaper = SpecialTokenEscaper(tokenizer)
        self._process = TemplateProcess("" if template is None else template.source)
        self._executor = SerialExecutor(
            "conversations", "the chat template", max_waiting=max_waiting, wait_seconds=wait_seconds
        )

    async def plan(self, asked: ChatCompletionRequest) -> ChatPlan:
        """Render the prompt of a chat request, and find the constraint and the parser of its completions.

        Raises the errors of `encode`, and InvalidRequest for a strict tool if neither a chat
        template nor --tool-format says how the model writes tool calls.
        """
        form = self._form
        tools, must_call = asked.callable_tools
        strict = next((tool.function.name for tool in tools if tool.function.strict), None)
        if strict is not None and form.is_plain:
            raise InvalidRequest.of(
                "tools",
                f": {strict!r} is strict, but the model's format of tool calls is unknown; leave out strict, or "
                "start the server with --tool-format",
            )
        more = dict(asked.chat_template_kwargs or {})
        effort = asked.reasoning_effort
        for name, value in (("reasoning_effort", effort), ("enable_thinking", effort != "none")):
            if effort is not None and name in form.variables:
                more.setdefault(name, value)
        token_ids, is_reasoning = await self._render(asked, asked.messages, tools=tools, more=more)
        schemas = [
            ToolSchema(
                name=tool.function.name,
                parameters=tool.function.schema_of_arguments(),
                lenient=not tool.function.strict,
            )
            for tool in tools
        ]
        return ChatPlan(
            token_ids=token_ids,
            constraint=self._constraint(asked, schemas, must_call=must_call, is_reasoning=is_reasoning),
            visible_token_ids=form.visible_token_ids(self._tokenizer, has_tools=bool(tools)),
            new_parser=form.new_parser(schemas, is_reasoning),
            call_id_length=form.tools.id_length,
            reasoning_end_id=None if form.reasoning is None else form.mark_ids.get(form.reasoning.closing),
        )

    async def encode(self, asked: TokenizeRequest, messages: Sequence[Message]) -> list[int]:
        """Return the prompt token ids of the conversation `messages`, rendered as the request says.

        Raises:
            InvalidRequest: the server has no template, or the conversation, its tools or template variables cannot be
                rendered.
            EngineFailed: the template failed, and the client passed no tools or variables that may be the cause.
            Overloaded: too many conversations wait for the thread, or this conversation waited too long.
        """
        ids, _ = await self._render(asked, messages, tools=asked.tools or (), more=asked.chat_template_kwargs or {})
        begin = self._tokenizer.bos_token_id
        return [begin, *ids] if asked.add_special_tokens and begin is not None and ids[:1] != [begin] else ids

    async def _render(
        self,
        asked: ConversationFields,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolDefinition],
        more: Mapping[str, Any],
    ) -> tuple[list[int], bool | None]:
        """Return the prompt token ids of a conversation, and the value of `is_reasoning` for `OutputParser`.

        tools: tools that the template describes. more: additional template variables.

        The value is True if the prompt ends within reasoning, False after reasoning, and None if the model decides.
        Raises the errors of `encode`.
        """
        if self._template is None:
            raise InvalidRequest(
                "this server has no chat template (--chat-template none); use /v1/completions", param="messages"
            )
        is_text = self._form.tools_go_to != "text" and self._form.arguments_are_text
        variables = self._template.variables(
            messages_for_template(messages, arguments_are_text=is_text),
            add_generation_prompt=asked.adds_generation_prompt,
            tools=[tool.for_template() for tool in tools] or None,
        )
        num_characters = sum(len(message["content"]) for message in variables["messages"])
        if num_characters > MAX_CHARACTERS:  # of a chain of stored responses, since a body is smaller
            raise InvalidRequest.of(
                "messages",
                f": the conversation has {num_characters} characters, over the limit of {MAX_CHARACTERS}; "
                "begin a new one",
            )
        if taken := [name for name in more if name in variables]:
            raise InvalidRequest.of(
                "chat_template_kwargs", f": the variable {taken[0]} is set by the server; leave it out"
            )
        continues = bool(asked.continue_final_message)
        return await self._executor.run(partial(self._encode, variables, more, continues=continues))

    def close(self) -> None:
        self._executor.close()
        self._process.close()

    def _constraint(
        self, asked: ChatCompletionRequest, tools: list[ToolSchema], *, must_call: bool, is_reasoning: bool | None
    ) -> OutputConstraint | None:
        """Return the constraint of a completion: the client's output format, or the grammar of a chat completion.

        The grammar is needed for tools, a limit of reasoning, and an output format after reasoning. None: any text.
        """
        form, wanted = self._form, asked.output_constraint
        reasons = form.reasoning is not None and is_reasoning is not False
        max_tokens = self._max_reasoning_tokens(asked) if reasons else None
        if not tools and max_tokens is None and (wanted is None or not reasons):
            return wanted
        body = None if wanted is None else {"kind": wanted.kind, "content": wanted.content, "lenient": wanted.lenient}
        content = {
            "reasoning": form.reasoning.name if reasons and form.reasoning is not None else None,
            "is_reasoning": is_reasoning,
            "max_reasoning_tokens": max_tokens,
            "tool_format": form.tools.name,
            "tools": [{"name": tool.name, "parameters": tool.parameters, "lenient": tool.lenient} for tool in tools],
            "must_call": must_call,
            "is_parallel": asked.value("parallel_tool_calls"),
            "body": body,
        }
        param = "tools" if tools else "thinking_token_budget" if wanted is None else wanted.param
        return OutputConstraint("chat", content, param)

    def _max_reasoning_tokens(self, asked: ChatCompletionRequest) -> int | None:
        """Return the maximum tokens of a completion's reasoning; None: no limit."""
        if asked.thinking_token_budget is not None:
            return asked.thinking_token_budget
        form = self._form
        assert form.reasoning is not None
        if asked.reasoning_effort is None or "reasoning_effort" in form.variables:
            return None
        return _EFFORT_TOKENS.get(asked.reasoning_effort) if form.reasoning.closing in form.mark_ids else None

    def _encode(
        self, variables: Mapping[str, Any], more: Mapping[str, Any], *, continues: bool
    ) -> tuple[list[int], bool | None]:
        form, tools = self._form, variables["tools"] or []
        try:
            (*messages, extra), breaker = self._escaper.escape([*variables["messages"], {"tools": tools, "more": more}])
            tools = extra["tools"]
            if form.tools_go_to == "text":
                messages, tools = write_tools_as_text(messages, tools, form.tools), []
            elif form.tools_go_to == "message" and tools:
                messages, tools = put_tools_in_message(messages, tools), []
            prefill = messages[-1].get("content", "") if continues else ""
            if continues:
                messages = mark_continuation(messages)
            given = {**variables, "messages": messages, "tools": tools or None, **extra["more"]}
            text = self._process.render(given)
            if continues:
                text = cut_at_continuation(text)
            is_reasoning = None if form.reasoning is None else begins_in_reasoning(text, form.reasoning, prefill)
            return self._escaper.encode(text, breaker), is_reasoning
        except TemplateFailure as failure:
            if failure.by_template:
                raise InvalidRequest(f"the chat template rejects the messages: {failure}", param="messages") from None
            if variables["tools"]:
                message = f"the chat template fails with these tools: {failure}; simplify their schemas"
                raise InvalidRequest(message, param="tools") from None
            if more:  # most likely a value has a type that the template does not expect
                message = f"the chat template fails with the variables in chat_template_kwargs: {failure}; correct them"
                raise InvalidRequest(message, param="chat_template_kwargs") from None
            raise EngineFailed(f"the model's chat template failed: {failure}", retry=False) from None
        except (ForbiddenText, TokenizerError) as error:
            raise InvalidRequest(str(error), param="messages") from None
