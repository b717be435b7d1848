"""Queue of conversations for the template process, and limits on messages and parts."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from model.chat.template import ChatTemplate
from model.tokenizer.byte_level import ByteLevelTokenizer
from service.http.request_io import MAX_CONTAINERS
from service.preprocess.chat_format import ChatFormat
from service.preprocess.chat_renderer import ChatPrompts
from service.protocol.chat import MAX_PARTS, Message, TokenizeRequest
from service.protocol.errors import Overloaded
from service.protocol.request_model import MAX_MESSAGES, MAX_PROMPTS
from tests.service.echo import EchoChannel

HELLO = Message(role="user", content="hi")


@pytest.fixture
def busy() -> Iterator[threading.Event]:
    """Yield an event that the renderer waits for."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def prompts(
    request: pytest.FixtureRequest,
    tokenizer: ByteLevelTokenizer,
    busy: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ChatPrompts]:
    """Yield an encoder in which conversations wait 0.05 s, or the test's parameter, for the thread."""
    template = ChatTemplate(source="{{ messages[0].content }}", origin="here")
    made = ChatPrompts(template, tokenizer, ChatFormat(), max_waiting=2, wait_seconds=getattr(request, "param", 0.05))

    def hang(*args: object, continues: bool) -> tuple[list[int], None]:
        busy.wait()
        return [1], None

    monkeypatch.setattr(made, "_encode", hang)
    yield made
    busy.set()
    made.close()


def encoding(prompts: ChatPrompts) -> "asyncio.Task[list[int]]":
    return asyncio.create_task(prompts.encode(TokenizeRequest(messages=[HELLO]), [HELLO]))


def test_conversations_waiting_too_long_behind_a_hanging_template_are_rejected(
    prompts: ChatPrompts, busy: threading.Event
) -> None:
    async def crowd() -> None:
        first = encoding(prompts)
        await asyncio.sleep(0)
        others = [encoding(prompts), encoding(prompts)]
        for other in others:
            with pytest.raises(Overloaded, match=r"busy with other conversations for 0\.05 s") as caught:
                await other
            assert (caught.value.status, caught.value.headers()["retry-after"]) == (429, "1")
        busy.set()
        assert await first == [1]
        assert await encoding(prompts) == [1]

    asyncio.run(crowd())


@pytest.mark.parametrize("prompts", [3600.0], indirect=True)
def test_more_conversations_than_may_wait_are_rejected(prompts: ChatPrompts, busy: threading.Event) -> None:
    async def crowd() -> None:
        tasks = [encoding(prompts) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 conversations are queued for the chat template"):
            await encoding(prompts)
        busy.set()
        assert await asyncio.gather(*tasks) == [[1]] * 3

    asyncio.run(crowd())


def test_a_cancelled_conversation_keeps_the_thread_until_rendering_ends(
    prompts: ChatPrompts, busy: threading.Event
) -> None:
    async def crowd() -> None:
        first = encoding(prompts)
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(Overloaded):
            await encoding(prompts)
        busy.set()
        while prompts._executor._turn.locked():  # until the thread has finished rendering
            await asyncio.sleep(0.001)
        assert await encoding(prompts) == [1]

    asyncio.run(crowd())


TEXT = {"type": "text", "text": "a"}
MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, f"at most {MAX_MESSAGES}"),
        ("/tokenize", {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, f"at most {MAX_MESSAGES}"),
        (
            "/v1/chat/completions",
            {"messages": [{**MESSAGE, "content": [TEXT] * (MAX_PARTS + 1)}]},
            f"messages[0].content must be a string, or a list of up to {MAX_PARTS}",
        ),
        ("/v1/completions", {"prompt": [[1]] * (MAX_PROMPTS + 1)}, f"up to {MAX_PROMPTS}"),
        ("/v1/completions", {"prompt": ["a"] * (MAX_PROMPTS + 1)}, f"up to {MAX_PROMPTS}"),
        ("/v1/completions", {"prompt": [[1]] * 200_000}, f"holds over {MAX_CONTAINERS} lists and objects"),
        ("/tokenize", {"prompt": "a", "messages": [{}] * 400_000}, f"holds over {MAX_CONTAINERS} lists and objects"),
    ],
)
def test_too_many_messages_parts_or_prompts_are_a_400_that_names_the_limit(
    client: TestClient, queue: EchoChannel, path: str, body: dict[str, object], said: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    assert queue.submits == []


def test_the_maximum_number_of_messages_and_parts_is_accepted(client: TestClient) -> None:
    messages = [{**MESSAGE, "content": [TEXT] * 2}] * MAX_MESSAGES
    assert client.post("/tokenize", json={"messages": messages}).status_code == 200
    parts = [{**MESSAGE, "content": [TEXT] * MAX_PARTS}]
    assert client.post("/tokenize", json={"messages": parts}).status_code == 200


@pytest.mark.parametrize("text", ["x" * 400_000, "[{" * 50_000, '"[\\"' * 50_000, "\\" * 99_999 + "[" * 50_000])
def test_brackets_within_texts_do_not_count_as_containers(client: TestClient, text: str) -> None:
    answer = client.post("/tokenize", json={"prompt": text})
    assert answer.status_code == 200
    assert client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"] == text
