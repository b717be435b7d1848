"""Training conversations with tools: made calls and results, and the token ids of the served prompts."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from model.chat.chatml import TEMPLATE
from model.chat.template import ChatTemplate
from model.training.corpus import conversation, encode_conversation
from model.training.data import make_conversations
from model.training.data.bpe import END_OF_TEXT
from service.preprocess.chat_format import read_chat_format
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.template_process import TemplateProcess
from service.protocol.chat import ChatCompletionRequest
from tests.chatml_model import chatml_tokenizer

TOKENIZER = chatml_tokenizer()
DIALOGUES = Path(make_conversations.__file__).with_name("tools.jsonl")
CALL = re.compile(r'<tool_call>\n\{"name": "(\w+)", "arguments": (\{.*\})\}\n</tool_call>')
TOOL = re.compile(r"(\w+)\((\w*)\)(?:: (.+))?")


@pytest.fixture(scope="module")
def prompts() -> Iterator[ChatPrompts]:
    template = ChatTemplate(source=TEMPLATE, origin="here", special_tokens={"bos_token": END_OF_TEXT})
    with closing(TemplateProcess(TEMPLATE)) as process:
        form = read_chat_format(template, process, TOKENIZER, tool_format="auto", reasoning_format="auto")
    assert (form.tools.name, form.tools_go_to, form.arguments_are_text) == ("hermes", "variable", False)
    with closing(ChatPrompts(template, TOKENIZER, form)) as prompts:
        yield prompts


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DIALOGUES.read_text().splitlines()]


def request(turns: list[list[str]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tools and messages with which a client holds a training conversation."""
    system, _, described = turns[0][1].rpartition("Tools:\n")
    tools = []
    for name, argument, description in map(signature, described.splitlines()):
        properties = {argument: {"type": "string", "description": "unseen"}} if argument else {}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": {**function, "description": description}})
    messages: list[dict[str, Any]] = [{"role": "system", "content": system.strip()}] if system else []
    for number, (speaker, text) in enumerate(turns[1:]):
        if found := CALL.fullmatch(text):
            call = {"id": f"call_{number}", "type": "function", "function": {"name": found[1], "arguments": found[2]}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif speaker == "T":
            messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": text})
        else:
            messages.append({"role": {"U": "user", "S": "assistant"}[speaker], "content": text})
    return tools, messages


def signature(line: str) -> tuple[str, str, str | None]:
    found = TOOL.fullmatch(line)
    assert found is not None
    return found[1], found[2], found[3]


def test_every_reply_is_trained_after_the_prompt_that_the_service_renders(prompts: ChatPrompts) -> None:
    """Before a call, after a result, and where no tool is needed."""
    kinds = set()
    for record in records():
        turns = make_conversations.make("dialogue", record, 3)
        ids, targets = encode_conversation(TOKENIZER, conversation(turns))
        tools, messages = request(turns)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            body = json.dumps({"messages": messages[:number], "tools": tools}).encode()
            prompt = asyncio.run(prompts.plan(ChatCompletionRequest.parse(body))).token_ids
            assert ids[: len(prompt)] == prompt
            assert targets[len(prompt) - 1 : len(prompt) + 1] == [False, True]
            kinds.add((messages[number - 1]["role"], "tool_calls" in message))
    assert kinds == {("user", True), ("tool", False), ("user", False)}


def test_calls_have_the_numbers_of_the_question_and_results_their_value() -> None:
    sums = []
    for record in records():
        turns = make_conversations.make("dialogue", record, 5)
        for (_, asked), (_, called), (_, result), (_, answer) in zip(
            turns, turns[1:], turns[2:], turns[3:], strict=False
        ):
            found = CALL.fullmatch(called)
            sum_ = re.search(r'"(\d[\d +*/-]+)"', called)
            if found is None or sum_ is None:
                continue
            numbers = re.findall(r"\d+", sum_[1])
            assert set(re.findall(r"\d+", asked)) <= set(numbers)
            if "rror" not in result:
                value = eval(sum_[1])
                written = f"{round(value, 4):.4f}".rstrip("0").rstrip(".")
                assert written in result
                assert written in answer
                sums.append(sum_[1])
    assert len(set(sums)) > 60
    assert {sign for sign in "+-*/" if any(sign in each for each in sums)} == set("+-*/")


def test_a_call_names_an_offered_tool_and_its_argument() -> None:
    for seed in range(8):
        for record in records():
            turns = make_conversations.make("dialogue", record, seed)
            tools, _ = request(turns)
            offered = {tool["function"]["name"]: set(tool["function"]["parameters"]["properties"]) for tool in tools}
            for called in filter(None, (CALL.fullmatch(text) for _, text in turns)):
                assert set(json.loads(called[2])) <= offered[called[1]]


def test_tools_without_use_are_offered_with_some_conversations_that_need_none() -> None:
    greeting = {"turns": [["U", "Who are you?"], ["S", "I am Kvasir."]]}
    made = [make_conversations.make("dialogue", greeting, seed) for seed in range(400)]
    offered = [turns for turns in made if "Tools:" in turns[0][1]]
    assert 5 < len(offered) < 50
    assert all(turns[1:] in (greeting["turns"], [["U", "who are you"], ["S", "I am Kvasir."]]) for turns in offered)
    asked = {"turns": [["U", "What time is it?"], ["S", "I do not know."]]}
    assert not any("Tools:" in make_conversations.make("dialogue", asked, seed)[0][1] for seed in range(400))


def test_placeholders_of_a_dialogue_are_filled_alike_in_all_turns() -> None:
    record = {"turns": [["U", "I am {name}, {small} years old."], ["S", "Hello, {name}, {small}!"]]}
    made = [make_conversations.make("dialogue", record, seed)[-2:] for seed in range(30)]
    for (_, said), (_, answer) in made:
        assert re.findall(r"[A-Z][a-z]+|\d+", said.partition("am ")[2]) == re.findall(r"[A-Z][a-z]+|\d+", answer)[1:]
    assert len({answer for _, (_, answer) in made}) > 20


def test_made_conversations_leave_no_placeholder() -> None:
    rng = random.Random(1)
    for record in records():
        turns = make_conversations.make("dialogue", record, rng.randrange(1000))
        assert not re.search(r"\{\w+\}", " ".join(text for _, text in turns))
