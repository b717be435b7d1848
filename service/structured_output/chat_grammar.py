"""Grammar of a chat completion: reasoning, then text, an output format or tool calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model.chat.reasoning import REASONING_FORMATS, ReasoningFormat
from model.chat.tool_formats.table import TOOL_FORMATS
from model.chat.tool_formats.tool_format import ToolSchema
from model.structured_output.grammar import GrammarError
from model.structured_output.lark_document import LarkDocument
from service.structured_output.json_schema import prepare_schema


def chat_grammar(
    content: Mapping[str, Any],
    mark_ids: Mapping[str, int],
    eos_token_ids: Sequence[int],
    grammar_of: Callable[[Mapping[str, Any]], str],
) -> str:
    """Return the grammar of a chat completion. `content` has these keys, see `ChatPrompts`:

        reasoning: name of the reasoning format, or None.
        is_reasoning: see `model.chat.output_parser.OutputParser`.
        max_reasoning_tokens: maximum tokens of the reasoning, or None.
        tool_format, tools: name of the format, and name, parameters and `lenient` of each tool that may be called.
        must_call: the completion must call a tool.
        is_parallel: the completion may call several tools.
        body: output constraint of the text, as `{"kind", "content", "lenient"}`, or None.

    Args:
        mark_ids: token ids of the tags of reasoning and tool calls that are single tokens, by text.
        grammar_of: returns the grammar of an output constraint.

    Raises:
        GrammarError: a schema or the limit of reasoning tokens cannot be enforced.
    """
    document = LarkDocument(mark_ids)
    body = None if content["body"] is None else document.nested(grammar_of(content["body"]))
    text = document.text() if body is None else body
    if content["tools"]:
        text = _calls(document, content, body)
    reasoning = REASONING_FORMATS.get(content["reasoning"])
    if reasoning is None or content["is_reasoning"] is False:
        return document.grammar(text)
    rest = _reasoning(document, reasoning, content["max_reasoning_tokens"], mark_ids, eos_token_ids)
    # Models put line ends between reasoning and answer, which an output format does not allow.
    gap = document.terminal(r"/[ \n]{0,4}/")
    if content["is_reasoning"]:
        return document.grammar(f"{rest} {gap} ({text})")
    return document.grammar(f"{document.literal(reasoning.opening)} {rest} {gap} ({text}) | {text}")


def _calls(document: LarkDocument, content: Mapping[str, Any], body: str | None) -> str:
    """Return the Lark expression of tool calls. Without `must_call`, text or the output format is allowed too."""
    form = TOOL_FORMATS[content["tool_format"]]
    tools = []
    for tool in content["tools"]:
        parameters = prepare_schema(tool["parameters"], lenient=tool["lenient"])
        tools.append(ToolSchema(name=tool["name"], parameters=parameters, lenient=tool["lenient"]))
    calls = form.calls(tools, document, is_parallel=content["is_parallel"])
    if content["must_call"]:
        return f"{document.literal(form.opening)} {calls}"
    return form.auto(document, calls) if body is None else f"{body} | {document.literal(form.opening)} {calls}"


def _reasoning(
    document: LarkDocument,
    reasoning: ReasoningFormat,
    max_tokens: int | None,
    mark_ids: Mapping[str, int],
    eos_token_ids: Sequence[int],
) -> str:
    """Return the Lark expression of reasoning after its opening tag, up to and including its closing tag.

    Raises GrammarError for a limit of reasoning tokens if the closing tag is not one token.
    """
    if max_tokens is None:
        return document.until(reasoning.closing)
    closing = mark_ids.get(reasoning.closing)
    if closing is None:
        raise GrammarError(
            f"the limit of reasoning tokens needs {reasoning.closing} as one token, which this model's tokenizer "
            "lacks; leave out thinking_token_budget, or thinking.budget_tokens of a message request"
        )
    return f"{document.tokens({closing, *eos_token_ids}, max_tokens=max_tokens)} {document.literal(reasoning.closing)}"
