"""Browser checks of the playground's chat mode."""

import json
import subprocess
import sys

from tests.playground.playground import Playground
from tests.playground.stub_server import HOSTILE, STORY, StubServer

IS_CHAT = "chatting() && document.getElementById('prompt-name').textContent === 'Your message'"
TURNS = "[...document.querySelectorAll('#turns .said')].map(e => e.textContent)"


def begin(page: Playground) -> bool:
    """Switch to the chat mode by keyboard. Return False if the server offers no chat."""
    page.open()
    if not page.visible("chat-switch"):
        return False
    page.browser.run("document.getElementById('chat').focus()")
    page.browser.press(" ")
    page.browser.until_script(IS_CHAT)
    return True


def check_conversation(page: Playground) -> None:
    """The second message is sent with the earlier messages."""
    if not begin(page):
        return
    first = page.generate("Hello! What is a fox?", max_tokens="20")
    assert first == page.browser.run("shown.characters.join('')") != ""
    assert page.browser.run("document.getElementById('prompt').value") == "", "there is room for the next message"
    assert page.browser.run("document.activeElement.id") == "prompt"
    assert page.text("echo") == "Hello! What is a fox?"
    assert page.text("seen-tokens") == page.text("told-tokens") != "–"
    assert not page.visible("continue")
    second = page.generate("And a hare?", max_tokens="20")
    assert page.browser.run(TURNS) == ["Hello! What is a fox?", first]
    sent = [
        {"role": "user", "content": "Hello! What is a fox?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And a hare?"},
    ]
    assert page.browser.run("shown.request.messages") == sent
    if page.record is not None:
        assert page.record.bodies[-1]["messages"] == sent
        assert "prompt" not in page.record.bodies[-1]
    assert page.browser.run("talk.at(-1)") == {"role": "assistant", "content": second}
    page.browser.run("document.getElementById('forget').click()")
    assert page.browser.run("talk.length") == 0
    assert (page.text("turns"), page.text("echo"), page.text("completion")) == ("", "", "")
    page.generate("Once more", max_tokens="5")
    assert page.browser.run("shown.request.messages.length") == 1


def check_two_modes(page: Playground) -> None:
    """Completion mode and chat mode have separate texts and separate controls."""
    if not begin(page):
        return
    page.browser.run("(e => { e.value = 'a message'; })(document.getElementById('prompt'))")
    for element in ("chips", "inside-open"):
        assert not page.visible(element)
    assert page.browser.run("document.getElementById('logprobs').disabled")
    page.browser.run("document.getElementById('chat').click()")
    assert page.visible("chips")
    assert page.browser.run("buildRequest().prompt").startswith("Once upon a time")
    assert not page.browser.run("document.getElementById('logprobs').disabled")
    page.browser.run("document.getElementById('chat').click()")
    assert page.browser.run("buildRequest().messages") == [{"role": "user", "content": "a message"}]
    page.browser.until_script("location.hash.includes('chat=on')")
    page.open(page.browser.run("location.hash"))
    page.browser.until_script(IS_CHAT)


def check_nothing_is_sent_without_a_message(page: Playground) -> None:
    if not begin(page):
        return
    page.browser.press("Enter", ctrl=True)
    assert page.browser.run("shown === null && document.activeElement.id === 'prompt'")


def check_copied_conversation(page: Playground) -> None:
    if not begin(page):
        return
    text = page.generate('It\'s a "fox"?', max_tokens="10", temperature="0", top_k="5")
    programs = (("curlCommand", ["bash", "-c"]), ("pythonProgram", [sys.executable, "-c"]))
    from_curl, from_python = (
        subprocess.run(
            [*program, page.browser.run(f"{name}(shown.request)")],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for name, program in programs
    )  # fmt: skip
    events = [json.loads(line[6:]) for line in from_curl.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == text
    assert from_python == text + "\n"


def check_conversation_stops(page: Playground) -> None:
    """A reply that the user stopped becomes part of the conversation."""
    if not begin(page):
        return
    page.start("<slow> Tell me a long story", max_tokens="300")
    page.browser.until_script("active === null || active.numChunks > 1")
    page.browser.press("Escape")
    page.wait()
    assert page.text("ending-reason") == "Stopped by you"
    assert page.browser.run("talk.at(-1).content") == page.text("completion") != ""


def check_a_turn_that_fails(page: Playground) -> None:
    """A reply that failed is not kept: the user's message stays in the prompt field."""
    assert begin(page)
    first = page.generate("Hello", max_tokens="60")
    assert page.problem("<503> again")["title"] == "The server is not ready"
    assert page.browser.run("document.getElementById('prompt').value") == "<503> again"
    assert page.problem("<cut> again")["title"] == "The connection was lost"
    assert page.browser.run("talk.map(m => m.content)") == ["Hello", first]


def check_a_conversation_is_text(page: Playground) -> None:
    assert begin(page)
    page.generate(f"<hostile> {HOSTILE}")
    page.generate("And then?", max_tokens="300")
    assert page.browser.run(TURNS) == [f"<hostile> {HOSTILE}", HOSTILE]
    assert page.text("completion") == STORY
    assert page.browser.run("document.title") == "Kvasir playground"
    assert page.browser.run("document.querySelector('#story img, #story script')") is None


def check_no_conversation(page: Playground) -> None:
    """A server without a chat template offers no chat mode, even if the link selects it."""
    server = StubServer(chats=False).start()
    try:
        other = Playground(page.browser, server.url, server.record)
        other.open("#chat=on")
        assert not other.visible("chat-switch")
        assert other.generate("Once upon a time", max_tokens="200") == STORY
    finally:
        server.stop()


CHAT_CHECKS = (
    check_conversation, check_two_modes, check_nothing_is_sent_without_a_message, check_copied_conversation,
    check_conversation_stops,
)  # fmt: skip
CHAT_STUB_CHECKS = (check_a_turn_that_fails, check_a_conversation_is_text, check_no_conversation)
