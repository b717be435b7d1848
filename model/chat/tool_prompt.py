"""Tools in conversations for chat templates without the variable `tools`: descriptions, calls and results as text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.chat.tool_formats.tool_format import ToolFormat


def write_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Return a conversation for a chat template that does not support tools.

    Descriptions of tools go into the system message, calls into assistant messages, results into user messages.

    messages, tools: as chat templates with tools receive them.
    """
    rewritten: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if calls := message.get("tool_calls"):
            rewritten.append({"role": message["role"], "content": content + write_calls(calls, form)})
        elif message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if rewritten and rewritten[-1].get("is_result"):
                rewritten[-1]["content"] += f"\n{result}"
            else:
                rewritten.append({"role": "user", "content": result, "is_result": True})
        else:
            rewritten.append(dict(message))
    for message in rewritten:
        message.pop("is_result", None)
    if tools:
        text = _describe(tools, form)
        if rewritten and rewritten[0]["role"] == "system":
            rewritten[0]["content"] = f"{rewritten[0]['content']}\n\n{text}"
        else:
            rewritten.insert(0, {"role": "system", "content": text})
    return rewritten


def put_tools_in_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a conversation whose system message has the tools' functions in its field `tools`, as JSON text.

    A conversation without a system message gets an empty one.
    """
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *map(dict, messages[1:])]
    return [{"role": "system", "content": "", "tools": text}, *map(dict, messages)]


def write_calls(calls: Iterable[Mapping[str, Any]], form: ToolFormat) -> str:
    """Return a message's tool calls as text in a tool format, including its `opening` and `closing`."""
    texts = [form.write_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return form.opening + form.separator.join(texts) + form.closing


def _describe(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.opening + form.write_call("NAME", {"ARGUMENT": "VALUE"}) + form.closing
    return (
        "You can call functions. Each line between the tags describes one function, with the JSON Schema of its "
        f"arguments:\n<tools>\n{lines}\n</tools>\nTo call a function, write its name and its arguments in this form:\n"
        f"{example}"
    )
