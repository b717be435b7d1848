"""Browser checks of the playground's chat mode, operated by keyboard."""

import json
import subprocess
import sys

from tests.playground.playground import Playground
from tests.playground.stub_server import CALLS, HOSTILE, MARKDOWN, REASONING, STORY, StubServer

PATH = "pathOf(talk).map(node => [node.role, node.content ?? node.results.map(result => result.content)])"
FOCUSED = "document.activeElement.dataset.id ?? document.activeElement.id"
LAST = "[...document.querySelectorAll('.message')].at(-1)"


def begin(page: Playground, state: str = "") -> bool:
    """Open the chat mode without conversations. Return False if the server offers no chat."""
    page.open(f"#mode=chat{state}")
    page.browser.run("localStorage.clear(), talks.clear(), newTalk()")
    return bool(page.browser.run("chatting()"))


def say(page: Playground, text: str) -> str:
    """Type a message, send it with Enter, and return the answer."""
    write(page, text)
    page.wait()
    return answer_text(page)


def write(page: Playground, text: str) -> None:
    page.browser.run("document.getElementById('message').focus()")
    page.browser.type(text)
    page.browser.press("Enter")
    page.browser.until_script("active !== null || pathOf(talk).at(-1)?.stats !== undefined")


def answer_text(page: Playground) -> str:
    text: str = page.browser.run("pathOf(talk).at(-1).content")
    return text


def check_conversation(page: Playground) -> None:
    """The second message is sent with the earlier messages, and a reload shows the conversation again."""
    if not begin(page, "&max_tokens=20"):
        return
    first = say(page, "Hello! What is a fox?")
    assert first != ""
    assert page.browser.run("document.getElementById('message').value") == "", "there is room for the next message"
    assert page.browser.run("document.activeElement.id") == "message"
    assert "first token" in page.browser.run(f"{LAST}.querySelector('.stats').textContent")
    assert "tokens/s" in page.browser.run(f"{LAST}.querySelector('.stats').textContent")
    second = say(page, "And a hare?")
    sent = [
        {"role": "user", "content": "Hello! What is a fox?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And a hare?"},
    ]
    assert page.browser.run("runs.get(pathOf(talk).at(-1).id).request.messages") == sent
    if page.record is not None:
        assert page.record.bodies[-1]["messages"] == sent
        assert "prompt" not in page.record.bodies[-1]
    page.open("#mode=chat")
    assert [content for _, content in page.browser.run(PATH)] == ["Hello! What is a fox?", first, "And a hare?", second]
    assert page.text("chat-title") == "Hello! What is a fox?"


def check_versions(page: Playground) -> None:
    """A retry and an edit make versions of a message; the arrow keys switch between versions."""
    if not begin(page, "&max_tokens=8"):
        return
    first = say(page, "Hello")
    page.browser.press("ArrowUp", alt=True)
    page.browser.press("r")
    page.wait()
    counter = f"{LAST}.querySelector('.branches')?.textContent"
    assert page.browser.run(counter) == "‹2/2›"
    page.browser.press("ArrowUp", alt=True)
    page.browser.press("ArrowLeft")
    assert page.browser.run(counter) == "‹1/2›"
    assert answer_text(page) == first
    page.browser.press("ArrowUp")
    page.browser.press("e")
    page.browser.run("document.activeElement.select()")
    page.browser.type("Goodbye")
    page.browser.press("Enter")
    page.wait()
    assert page.browser.run(PATH)[0] == ["user", "Goodbye"]
    assert page.browser.run("runs.get(pathOf(talk).at(-1).id).request.messages.length") == 1
    page.browser.run("document.querySelector('.message').focus()")
    page.browser.press("ArrowLeft")
    assert page.browser.run(PATH) == [["user", "Hello"], ["assistant", first]]
    page.open("#mode=chat")
    assert page.browser.run(PATH) == [["user", "Hello"], ["assistant", first]], "the choice of versions is kept"
    assert page.browser.run("versionsOf(talk, pathOf(talk)[0]).length") == 2


def check_conversation_list(page: Playground) -> None:
    """Conversations are made, chosen, renamed and deleted by keyboard, and stay after a reload."""
    if not begin(page, "&max_tokens=3"):
        return
    for text in ("One", "Two"):
        page.browser.press("n", alt=True)
        say(page, text)
    titles = "[...document.querySelectorAll('#chat-list .open')].map(e => e.textContent)"
    assert page.browser.run(titles) == ["Two", "One"]
    page.browser.run("document.querySelector('#chat-list .open').focus()")
    page.browser.press("ArrowDown")
    page.browser.press("Enter")
    assert page.text("chat-title") == "One"
    page.browser.run("document.querySelector('[data-current] .open').focus()")
    page.browser.press("F2")
    page.browser.run("document.activeElement.select()")
    page.browser.type("First <b>")
    page.browser.press("Enter")
    assert page.browser.run(titles) == ["Two", "First <b>"]
    page.open("#mode=chat")
    assert page.browser.run(titles) == ["Two", "First <b>"]
    page.browser.run("document.querySelector('#chat-list .open').focus()")
    page.browser.press("Delete")
    assert page.browser.run(titles) == ["Two", "First <b>"], "the first press asks"
    page.browser.press("Enter")
    assert page.browser.run(titles) == ["First <b>"]
    assert page.text("chat-title") == "First <b>"


def check_two_modes(page: Playground) -> None:
    """Completion mode and chat mode have separate texts and separate controls."""
    if not begin(page):
        return
    page.browser.type("a message")
    assert not page.visible("prompt")
    assert page.browser.run("buildRequest().messages") == [{"role": "user", "content": "a message"}]
    page.browser.run("document.getElementById('mode-completion').click()")
    assert page.visible("prompt")
    assert not page.visible("message")
    assert page.browser.run("buildRequest().prompt").startswith("Once upon a time")
    page.browser.until_script("location.hash.includes('mode=completion')")
    page.browser.run("document.getElementById('mode-chat').click()")
    assert page.browser.run("document.getElementById('message').value") == "a message"
    page.browser.until_script("location.hash.includes('mode=chat')")
    page.browser.open(f"{page.url}/playground")
    page.browser.until_script("chatting()")
    page.browser.open(f"{page.url}/playground#prompt=Once")
    page.browser.until_script("server.model !== null && server.chats")
    assert not page.browser.run("chatting()"), "a link with a prompt opens a completion"
    page.browser.open(f"{page.url}/playground#chat=on")
    page.browser.until_script("chatting()")


def check_settings_are_kept(page: Playground) -> None:
    if not begin(page):
        return
    set_temperature = "(e => { e.value = '0.25'; e.dispatchEvent(new Event('input', { bubbles: true })); })"
    page.browser.run(f"{set_temperature}(document.getElementById('temperature'))")
    page.browser.until_script("location.hash.includes('0.25')")
    page.browser.open(f"{page.url}/playground")
    page.browser.until_script("chatting() && location.hash.includes('0.25')")
    assert page.browser.run("buildRequest().temperature") == 0.25
    page.browser.run("document.getElementById('reset').click()")
    page.browser.until_script("!location.hash.includes('0.25')")
    page.browser.open(f"{page.url}/playground")
    page.browser.until_script("chatting()")
    assert page.browser.run("buildRequest().temperature") == 0.7


def check_system_prompt(page: Playground) -> None:
    if not begin(page, "&max_tokens=3"):
        return
    page.browser.run("document.getElementById('system').focus()")
    page.browser.type("Be brief.")
    say(page, "Hello")
    sent = page.browser.run("runs.get(pathOf(talk).at(-1).id).request.messages")
    assert sent == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    page.browser.run("newTalk()")
    assert page.browser.run("document.getElementById('system').value") == ""
    page.browser.run("openTalk(sortedTalks()[0])")
    assert page.browser.run("document.getElementById('system').value") == "Be brief."


def check_nothing_is_sent_without_a_message(page: Playground) -> None:
    if not begin(page):
        return
    page.browser.press("Enter", ctrl=True)
    assert page.browser.run("active === null && pathOf(talk).length === 0 && document.activeElement.id === 'message'")


def check_shift_enter_is_a_line_break(page: Playground) -> None:
    if not begin(page):
        return
    page.browser.type("one")
    page.browser.press("Enter", shift=True)
    page.browser.type("two")
    assert page.browser.run("active === null && document.getElementById('message').value") == "one\ntwo"


def check_copied_conversation(page: Playground) -> None:
    if not begin(page, "&max_tokens=10&temperature=0&top_k=5&repetition_penalty=1.1"):
        return
    text = say(page, 'It\'s a "fox"?')
    programs = (("curlCommand", ["bash", "-c"]), ("pythonProgram", [sys.executable, "-c"]))
    from_curl, from_python = (
        subprocess.run(
            [*program, page.browser.run(f"{name}(runs.get(pathOf(talk).at(-1).id).request)")],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for name, program in programs
    )  # fmt: skip
    events = [json.loads(line[6:]) for line in from_curl.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == text
    assert from_python == text + "\n"


def check_conversation_stops(page: Playground) -> None:
    """An answer that the user stopped stays in the conversation."""
    if not begin(page, "&max_tokens=300"):
        return
    write(page, "<slow> Tell me a long story")
    page.browser.until_script("active === null || active.numChunks > 1")
    page.browser.press("Escape")
    page.wait()
    assert "stopped by you" in page.browser.run(f"{LAST}.querySelector('.stats').textContent")
    assert answer_text(page) != ""
    assert not page.visible("problem")


def check_chat_probabilities(page: Playground) -> None:
    """Chat tokens are coloured, and the lens shows the alternatives, also by keyboard."""
    if not begin(page, "&max_tokens=150&logprobs=on&seed=5"):
        return
    text = say(page, "Tell me a story")
    spans = f"{LAST}.querySelectorAll('.token')"
    assert page.browser.run(f"{spans}.length") > 10
    assert page.browser.run(f"{LAST}.querySelector('.said').innerText").strip() == text.strip(), "line breaks are shown"
    page.browser.press("ArrowUp", alt=True)
    page.browser.press("ArrowRight", shift=True)
    page.browser.press("ArrowRight", shift=True)
    assert page.browser.run(f"[...{spans}].findIndex(span => span.matches('.active'))") == 1
    assert page.browser.run("document.querySelectorAll('#odds .percent').length") >= 5
    drawn = page.browser.run("document.querySelector('#odds .word.drawn').textContent")
    assert drawn.strip("␣") in page.browser.run(f"{spans}[1].textContent")


def check_help_and_colours(page: Playground) -> None:
    if not begin(page):
        return
    page.browser.press("/", ctrl=True)
    assert page.visible("help")
    page.browser.press("Escape")
    page.browser.until_script("!document.getElementById('help').open")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.browser.run(paper)
    for theme in ("light", "dark"):
        page.browser.run("document.getElementById('theme').click()")
        assert page.browser.run("document.documentElement.dataset.theme") == theme
    assert page.browser.run(paper) != before, "dark differs from the light default"
    page.open("#mode=chat")
    assert page.browser.run("document.documentElement.dataset.theme") == "dark"
    page.browser.run("document.getElementById('theme').click()")
    assert page.browser.run(paper) == before


def check_keyboard_reaches_every_control(page: Playground) -> None:
    """Tab from the message box visits every control that is visible, and each shows the focus."""
    if not begin(page, "&max_tokens=3"):
        return
    say(page, "Hello")
    controls = "[...document.querySelectorAll('button, input, textarea, summary, select')]"
    visible = f"{controls}.filter(e => e.tabIndex >= 0 && !e.disabled && e.checkVisibility())"
    page.browser.run(f"{visible}.forEach(e => e.dataset.waits = '')")
    num_waiting = page.browser.run(f"{visible}.length")
    assert num_waiting > 25
    for _ in range(num_waiting + 8):
        page.browser.press("Tab")
        page.browser.run("document.activeElement.removeAttribute('data-waits')")
        style = "getComputedStyle(document.activeElement)"
        if page.browser.run("document.activeElement.matches('button, input, textarea, summary')"):
            assert page.browser.run(f"{style}.outlineStyle") == "solid", page.browser.run(FOCUSED)
    assert page.browser.run("[...document.querySelectorAll('[data-waits]')].map(e => e.outerHTML)") == []


def check_chat_screens(page: Playground) -> None:
    for width, height in ((320, 640), (390, 844), (768, 1024), (1024, 640), (1280, 800), (1920, 1200)):
        page.browser.set_screen(width, height, phone=width < 700)
        if not begin(page, "&max_tokens=60"):
            break
        say(page, "There was " + "averyverylongword" * 12)
        assert page.browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{width} scrolls sideways"
        assert page.browser.run("document.documentElement.scrollHeight <= innerHeight + 1") or width < height > 900
        bottom = "document.getElementById('message').getBoundingClientRect().bottom"
        assert page.browser.run(f"{bottom} <= innerHeight"), width
        for name in ("rail", "chats") if width < 896 else ():
            page.browser.run(f"document.getElementById('{name}-name').click()")
            fits = f"(panel => panel.scrollWidth <= panel.clientWidth)(document.getElementById('{name}'))"
            assert page.browser.run(fits), f"{name} scrolls sideways at {width}"
            page.browser.press("Escape")
            assert not page.browser.run(f"document.getElementById('{name}').open")
    page.browser.set_screen(1280, 800)


def check_a_turn_that_fails(page: Playground) -> None:
    """After an error the message stays, and Try again answers it. What arrived of an answer is kept as a version."""
    assert begin(page)
    first = say(page, "Hello")
    say(page, "<503> again")
    assert page.text("problem-title") == "The server is not ready"
    assert page.text("retry") == "Try again in 30 s"
    assert [content for _, content in page.browser.run(PATH)] == ["Hello", first, "<503> again"]
    say(page, "<cut> again")
    assert page.text("problem-title") == "The connection was lost"
    assert [role for role, _ in page.browser.run(PATH)] == ["user", "assistant", "user", "assistant"]
    assert STORY.startswith(answer_text(page))
    assert "not finished" in page.browser.run(f"{LAST}.querySelector('.stats').textContent")
    page.browser.run("document.getElementById('retry').click()")
    page.wait()
    assert page.browser.run(f"{LAST}.querySelector('.branches').textContent") == "‹2/2›"
    assert page.record is not None
    assert [m["content"] for m in page.record.bodies[-1]["messages"]] == ["Hello", first, "<cut> again"]


def check_a_busy_chat(page: Playground) -> None:
    assert page.record is not None
    page.record.num_busy = 0
    assert begin(page)
    say(page, "<429> Hello")
    assert page.text("problem-title") == "The server is busy"
    assert page.text("retry") == "Try again in 2 s"
    page.browser.until_script("!document.getElementById('retry').disabled")
    page.browser.run("document.getElementById('retry').click()")
    page.wait()
    assert answer_text(page) == STORY
    assert not page.visible("problem")


def check_a_conversation_is_text(page: Playground) -> None:
    assert begin(page)
    say(page, f"<hostile> {HOSTILE}")
    assert page.browser.run(f"{LAST}.querySelector('.said').textContent") == HOSTILE.replace("**", "")
    assert page.browser.run("document.querySelector('.message.user .said').textContent") == f"<hostile> {HOSTILE}"
    say(page, "<markdown>")
    assert page.browser.run("document.title") == "Kvasir playground"
    assert page.browser.run("document.querySelector('#thread img, #thread script, #thread b')") is None


def check_markdown(page: Playground) -> None:
    assert begin(page)
    assert say(page, "<markdown>") == MARKDOWN
    shown = f"(selector => [...{LAST}.querySelectorAll('.said ' + selector)].map(e => e.textContent))"
    wanted = {
        "h4": ["A plan"],
        "strong": ["three"],
        "ol > li > ul > li": ["gently"],
        "ol > li:nth-child(2)": ["Read <script>document.title=3</script>"],
        "pre": ['print("<b>hello</b>")'],
        "td": ["gold", "<img src=x onerror=document.title=4>"],
        "blockquote a": ["the docs", "https://example.org/x"],
    }
    assert {selector: page.browser.run(f"{shown}({selector!r})") for selector in wanted} == wanted
    links = f"[...{LAST}.querySelectorAll('a')].map(a => [a.protocol, a.rel, a.target])"
    assert page.browser.run(links) == [["https:", "noopener noreferrer", "_blank"]] * 2
    page.browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    page.browser.run(f"{LAST}.querySelector('.block button').click()")
    assert page.browser.run("window.copied") == 'print("<b>hello</b>")'


def check_reasoning(page: Playground) -> None:
    """Reasoning is folded under its time, and is not sent back."""
    assert begin(page)
    assert say(page, "<think>") == "Hello! I am a stub."
    details = f"{LAST}.querySelector('.reasoning')"
    assert page.browser.run(f"{details}.checkVisibility() && !{details}.open")
    assert page.browser.run(f"{details}.querySelector('summary').textContent").startswith("Thought for 0.")
    assert page.browser.run(f"{details}.querySelector('.thought').textContent") == REASONING
    say(page, "And now?")
    assert page.record is not None
    assert page.record.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Hello! I am a stub."}


def check_tools(page: Playground) -> None:
    """Calls are shown as cards. Their results are typed and sent as one message of the role `tool` for each call."""
    assert page.record is not None
    assert begin(page)
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for _, name, _ in CALLS]
    page.browser.run("document.getElementById('tools').closest('details').open = true")
    page.browser.run("document.getElementById('tools').focus()")
    page.browser.type("[not JSON")
    num_bodies = len(page.record.bodies)
    page.browser.run("document.getElementById('message').focus()")
    page.browser.type("<tools>")
    page.browser.press("Enter")
    assert "not JSON" in page.text("tools-hint")
    assert page.browser.run("document.activeElement.id") == "tools"
    assert len(page.record.bodies) == num_bodies, "nothing was sent"
    page.browser.run("document.activeElement.select()")
    page.browser.type(json.dumps(tools))
    page.browser.run("document.getElementById('message').focus()")
    page.browser.press("Enter")
    page.wait()
    assert page.record.bodies[-1]["tools"] == tools
    cards = f"[...{LAST}.querySelectorAll('.call')].map(card => [...card.children].map(e => e.textContent))"
    assert page.browser.run(f"({cards}).map(([name, text]) => [name, JSON.parse(text)])") == [
        [name, json.loads(arguments)] for _, name, arguments in CALLS
    ]
    assert page.browser.run("document.activeElement.matches('.results textarea')"), "the result is typed next"
    page.browser.type("rain")
    page.browser.press("Tab")
    page.browser.type("noon")
    page.browser.press("Enter")
    page.wait()
    assert answer_text(page) == "The tools say: rain and noon."
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in CALLS
    ]
    assert page.record.bodies[-1]["messages"] == [
        {"role": "user", "content": "<tools>"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]
    page.open("#mode=chat")
    assert page.browser.run(PATH)[2] == ["tool", ["rain", "noon"]]
    page.browser.run("document.querySelector('.message.tool').focus()")
    page.browser.press("e")
    page.browser.run("document.activeElement.select()")
    page.browser.type("snow")
    page.browser.press("Enter")
    page.wait()
    assert answer_text(page) == "The tools say: snow and noon."


def check_no_conversation(page: Playground) -> None:
    """A server without a chat template offers no chat mode, even if the link selects it."""
    server = StubServer(chats=False).start()
    try:
        other = Playground(page.browser, server.url, server.record)
        other.open("#mode=chat")
        assert not other.visible("modes")
        assert other.generate("Once upon a time", max_tokens="200") == STORY
    finally:
        server.stop()


CHAT_CHECKS = (
    check_conversation, check_versions, check_conversation_list, check_two_modes, check_settings_are_kept,
    check_system_prompt, check_nothing_is_sent_without_a_message, check_shift_enter_is_a_line_break,
    check_copied_conversation, check_conversation_stops, check_chat_probabilities, check_help_and_colours,
    check_keyboard_reaches_every_control, check_chat_screens,
)  # fmt: skip
CHAT_STUB_CHECKS = (
    check_a_turn_that_fails, check_a_busy_chat, check_a_conversation_is_text, check_markdown, check_reasoning,
    check_tools, check_no_conversation,
)  # fmt: skip
