"""Checks of the playground page in a real browser.

    python -m tests.playground.browser_check                                # against a stub server that can fail
    python -m tests.playground.browser_check --url http://127.0.0.1:8000    # against a running service
    … --screenshots DIR    # also write playground.png, inside.png and others, and their -dark and -phone variants

Needs Chromium on the PATH and, to run the copied commands, curl and the `openai` package. Prints a line per check. The
exit status is 1 if a check failed. Not collected by pytest: a new machine has no browser.
"""

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.protocol.completions import CompletionRequest
from tests.playground import event_stream
from tests.playground.chat_check import CHAT_CHECKS, CHAT_STUB_CHECKS, begin, say
from tests.playground.chromium import Chromium
from tests.playground.inside_check import INSIDE_CHECKS, INSIDE_STUB_CHECKS, choose, look
from tests.playground.key_check import KEY_STUB_CHECKS
from tests.playground.playground import Playground
from tests.playground.stub_server import HOSTILE, STORY, Record, StubServer

DESK: dict[str, Any] = {"width": 1280, "height": 800}
PHONE: dict[str, Any] = {"width": 390, "height": 844, "phone": True}
SHOT_STATE = "#seed=11&max_tokens=120&logprobs=on"
SHOT_CHAT = "&seed=11&max_tokens=120&logprobs=on"
SHOT_TOKEN = 40
SHOT_LOOK = {"layer": "4", "head": "1"}  # of the shipped model: the head whose " it" looks at " dog"
SHOT_WORD = " it"

# Token spans that show a wrong text. A token that is part of a character has no text.
MISPLACED_TOKENS = """[...document.querySelectorAll('.token')].slice(0, -1).filter(span => {
  const { text } = shown.tokens[span.dataset.index];
  return !text.startsWith('bytes:') && span.textContent !== (text.trimStart() || text);
}).map(span => span.textContent)"""


def check_parser(page: Playground) -> None:
    page.open()
    assert page.browser.run(event_stream.CHECK % list(event_stream.INPUT.encode())) == [event_stream.OUTPUT]


def check_stream(page: Playground) -> None:
    page.open()
    assert "ready" in page.text("readiness")
    page.start("Once upon a time", max_tokens="60", seed="5")
    page.browser.until_script("active === null || active.numChunks > 5")
    page.browser.until_script("document.getElementById('completion').textContent.length > 0")
    page.wait()
    assert page.text("echo") == "Once upon a time"
    assert page.text("completion") == page.browser.run("shown.characters.join('')") != ""
    assert page.text("ending-reason").split(":")[0] in ("length", "stop")
    assert "prompt tokens" in page.text("ending-detail")
    for row in ("seen", "told"):
        for name in ("first", "between", "rate", "total", "tokens"):
            assert page.text(f"{row}-{name}") not in ("", "–"), f"{row}-{name}"
    assert page.text("seen-tokens") == page.text("told-tokens")
    assert page.browser.run("document.activeElement.id") == "prompt", "the keyboard focus stays on the prompt"
    if page.record is not None:
        assert STORY.startswith(page.text("completion"))


def check_nothing_moves(page: Playground) -> None:
    page.open()
    before = page.boxes()
    page.start("Once upon a time", max_tokens="120", seed="5")
    page.browser.until_script("active === null || active.numChunks > 10")
    during = page.boxes()
    page.wait()
    assert before == during == page.boxes()


def check_stop(page: Playground) -> None:
    page.open()
    num_left = 0 if page.record is None else page.record.num_left
    page.start("<slow> It was a long, long day" if page.record else "It was a long, long day", max_tokens="400")
    page.browser.until_script("active === null || active.numChunks > 1")
    page.browser.press("Escape")
    page.wait()
    assert page.text("ending-reason") == "Stopped by you"
    assert page.text("completion") != ""
    assert not page.visible("problem")
    if record := page.record:
        page.browser.until(lambda: record.num_left == num_left + 1, "the server to notice the disconnect")


def check_tokens(page: Playground) -> None:
    page.open()
    text = page.generate("Once upon a time", max_tokens="150", seed="5", logprobs=True)
    assert text == page.browser.run("shown.characters.join('')")
    assert page.browser.run("document.querySelectorAll('.token').length") > 20
    assert page.browser.run(MISPLACED_TOKENS) == []
    page.browser.run("document.querySelector('.token').scrollIntoView()")
    page.browser.point_at(".token")
    assert page.visible("lens")
    assert page.browser.run("document.querySelectorAll('#odds .percent').length") >= 5
    drawn = page.browser.run("document.querySelector('#odds .word.drawn').textContent")
    assert drawn == page.browser.run("visible(shown.tokens[document.querySelector('.token').dataset.index].text)")
    page.browser.run("document.getElementById('story').focus()")
    page.browser.press("ArrowRight")
    assert page.browser.run("[...document.querySelectorAll('.token')].findIndex(t => t.matches('.active'))") == 1
    assert "%" in page.text("announcement")
    page.browser.press("Escape")
    assert not page.visible("lens")


def check_copies(page: Playground) -> None:
    page.open()
    page.browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    prompt = '"It\'s" a \\ $HOME `fox`,\nsaid “Tom” 🦊\tand'
    sampling = {"top_k": "40", "min_p": "0.02", "top_p": "0.9", "temperature": "0.65", "seed": "7"}
    text = page.generate(prompt, max_tokens="30", stop="\\n\\n\nThe 'end'", logprobs=True, **sampling)
    outputs = []
    for button, program in (("copy-curl", ["bash", "-c"]), ("copy-python", [sys.executable, "-c"])):
        page.browser.run(f"document.getElementById('{button}').click()")
        page.browser.until_script(f"document.getElementById('{button}').textContent === 'Copied'")
        copied = page.browser.run("window.copied")
        outputs.append(
            subprocess.run([*program, copied], capture_output=True, text=True, check=True, timeout=60).stdout
        )
    from_curl, from_python = outputs
    events = [json.loads(line[6:]) for line in from_curl.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == text
    assert from_python == text + "\n"
    if page.record is not None:
        shown, by_curl, by_python = page.record.bodies[-3:]
        assert shown == by_curl == by_python
        assert CompletionRequest.parse(json.dumps(shown).encode()).stop == ["\n\n", "The 'end'"]


def check_link(page: Playground) -> None:
    page.open()
    prompt = "a+b & 50% of #1\n“Tom”"
    page.generate(prompt, max_tokens="3", temperature="0", stop="END", logprobs=True)
    page.browser.until_script("location.hash.includes('END')")
    sent = page.browser.run("JSON.stringify(buildRequest())")
    state = page.browser.run("location.hash")
    page.open(state)
    assert page.browser.run("JSON.stringify(buildRequest())") == sent
    assert json.loads(sent)["temperature"] == 0
    page.open()
    assert page.browser.run("JSON.stringify(buildRequest())") != sent


def check_limits(page: Playground) -> None:
    page.open()
    page.browser.run("(e => { e.value = '-1'; })(document.getElementById('top_k'))")
    page.browser.press("Enter", ctrl=True)
    assert page.browser.run("shown === null && document.activeElement.id === 'top_k'"), "nothing was sent"


def check_markup_stays_text(page: Playground) -> None:
    page.open()
    title, count = "document.title", "document.querySelectorAll('#story *').length"
    before = page.browser.run(count)
    page.generate(f"<hostile> {HOSTILE}", max_tokens="200")
    assert page.browser.run(title) == "Kvasir playground"
    assert page.browser.run(count) == before
    assert page.text("echo") == f"<hostile> {HOSTILE}"
    if page.record is not None:
        assert page.text("completion") == HOSTILE
        page.generate(f"<hostile> {HOSTILE}", logprobs=True)
        assert page.text("completion") == HOSTILE
        page.browser.run("showLens(document.querySelector('.token'))")
        assert page.browser.run("document.querySelector('#story img, #story b, #lens img')") is None
    page.open("#prompt=%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D3%22%3E&model=%3Cb%3E")
    assert page.browser.run(title) == "Kvasir playground"


def check_screens(page: Playground) -> None:
    for width, height in ((320, 640), (390, 844), (768, 1024), (1024, 640), (1280, 800), (1920, 1200)):
        page.browser.set_screen(width, height, phone=width < 700)
        page.open("#logprobs=on")
        page.generate("There was " + "averyverylongword" * 12, max_tokens="40")
        assert page.browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{width} scrolls sideways"
        assert page.browser.run("document.getElementById('caret').getBoundingClientRect().bottom <= innerHeight"), width
    page.browser.set_screen(**DESK)


def check_scrolling(page: Playground) -> None:
    """The page scrolls with the end of the text, except while the user has scrolled back."""
    follows = "document.getElementById('caret').getBoundingClientRect().bottom <= innerHeight"
    for screen, scroller in ((DESK, "document.getElementById('page')"), (PHONE, "document.scrollingElement")):
        page.browser.set_screen(**screen)
        page.open()
        page.start("<steady> " + "Once upon a time there was a fox. " * 30, max_tokens="200")
        page.browser.until_script("active.numChunks > 5")
        assert page.browser.run(f"{scroller}.scrollTop > 0 && {follows}")
        for _ in range(4):
            page.browser.wheel("#story", -15)
        page.browser.until_script("!following")
        page.browser.until(partial(page.rests, scroller), "the scroll position to stay unchanged")
        page.browser.wheel("#story", 2000)
        page.browser.until_script("following")
        page.wait()
        assert page.browser.run(follows)
    page.browser.set_screen(**DESK)


def check_errors(page: Playground) -> None:
    page.open()
    refused = page.problem("<400>")
    assert refused["message"] == "top_k must not be negative, not -3"
    assert "400" in refused["detail"]
    assert "top_k" in refused["detail"]
    assert not refused["retry"]
    assert page.browser.run("document.getElementById('top_k').ariaInvalid") == "true"
    assert "shutting down" in page.problem("<503>")["message"]
    assert page.text("retry") == "Try again in 30 s"
    assert page.problem("<html>")["message"] == "<html><b>Bad Gateway</b></html>"
    for fault, title in (
        ("<error>", "The server ended the stream with an error"),
        ("<cut>", "The connection was lost"),
    ):
        assert page.problem(fault)["title"] == title
        assert STORY.startswith(page.text("completion"))
        assert len(page.text("completion")) > 20, "what arrived is kept"
    assert page.problem("<truncated>")["title"] == "The connection was lost"
    page.generate("Once upon a time")
    assert not page.visible("problem")


def check_busy(page: Playground) -> None:
    page.open()
    assert page.problem("<429>")["title"] == "The server is busy"
    assert page.text("retry") == "Try again in 2 s"
    assert page.browser.run("document.getElementById('retry').disabled")
    page.browser.until_script("document.getElementById('retry').textContent === 'Try again in 1 s'")
    page.browser.until_script("!document.getElementById('retry').disabled")
    page.browser.run("document.getElementById('retry').click()")
    page.wait()
    assert STORY.startswith(page.text("completion"))
    assert not page.visible("problem")


def check_line_ends(page: Playground) -> None:
    for line_end in ("\r\n", "\r"):
        with stub(line_end=line_end) as (url, _):
            other = Playground(page.browser, url, None)
            other.open()
            assert other.generate("Once upon a time", max_tokens="200") == STORY


def check_no_server(page: Playground) -> None:
    with stub() as (url, _):
        other = Playground(page.browser, url, None)
        other.open()
    assert other.problem("Once upon a time")["title"] == "No response"
    other.browser.until_script("document.getElementById('readiness').textContent === 'not reachable'")


CHECKS: tuple[Callable[[Playground], None], ...] = (
    check_parser, check_stream, check_nothing_moves, check_stop, check_tokens, check_copies, check_link, check_limits,
    check_markup_stays_text, check_screens, *INSIDE_CHECKS, *CHAT_CHECKS,
)  # fmt: skip
STUB_CHECKS = (
    check_scrolling, check_errors, check_busy, check_line_ends, check_no_server, *INSIDE_STUB_CHECKS, *KEY_STUB_CHECKS,
    *CHAT_STUB_CHECKS,
)  # fmt: skip


def check_quiet(browser: Chromium, url: str) -> None:
    """Check that the page raised no exception and sent no request to another server."""
    thrown = [event["params"] for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
    assert not thrown, thrown
    asked = [
        event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"
    ]
    strangers = [
        to for to in asked if urlsplit(to).hostname != urlsplit(url).hostname and not to.startswith(("data:", "about:"))
    ]
    assert not strangers, strangers


def take_screenshots(page: Playground, tool_page: Playground, folder: Path) -> None:
    """Save screenshots: a chat, light, dark and on a phone, a completion, tool calls, and the attention weights."""
    folder.mkdir(parents=True, exist_ok=True)
    screens: dict[str, dict[str, Any]] = {
        "": DESK,
        "-dark": DESK | {"dark": True},
        "-phone": PHONE | {"scale": 2},
        "-phone-dark": PHONE | {"scale": 2, "dark": True},
    }
    for name, screen in screens.items():
        page.browser.set_screen(**screen)
        begin(page, SHOT_CHAT)
        for message in ("Hello! Who are you?", "Tell me a story about a little fox."):
            say(page, message)
        if "phone" not in name:
            tokens = "[...document.querySelectorAll('article')].at(-1).querySelectorAll('.token')"
            page.browser.run(f"{tokens}[{SHOT_TOKEN}].id = 'shot'")
            page.browser.point_at("#shot")
        page.browser.screenshot(folder / f"playground{name}.png")
        begin(tool_page)
        page.browser.run("document.getElementById('tools').value = '[{}]'")
        for message in ("<think> Hello", "<tools> Is it raining in Bergen?"):
            say(tool_page, message)
        page.browser.screenshot(folder / f"playground-tools{name}.png")
        page.open(SHOT_STATE)
        page.browser.run("document.getElementById('generate').click()")
        page.wait()
        page.browser.screenshot(folder / f"playground-completion{name}.png")
        look(page)
        for kind, value in SHOT_LOOK.items():
            choose(page, kind, value)
            page.browser.until_script(f"inside.look.layer === {SHOT_LOOK['layer']}")
        page.browser.run(f"lookAt(inside.look.tokens.indexOf({SHOT_WORD!r}))")
        page.browser.screenshot(folder / f"inside{name}.png")
    page.browser.set_screen(**DESK)


@contextmanager
def stub(**options: Any) -> Iterator[tuple[str, Record]]:
    server = StubServer(**options).start()
    try:
        yield server.url, server.record
    finally:
        server.stop()


def run_checks(page: Playground, checks: Sequence[Callable[[Playground], None]]) -> int:
    """Run all checks and return the number of failed checks."""
    num_failed = 0
    for check in checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            check(page)
            check_quiet(page.browser, page.url)
            print(f"ok      {name}")
        except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
            num_failed += 1
            place = traceback.extract_tb(error.__traceback__)[1]
            print(f"FAILED  {name}: line {place.lineno}: {place.line}  {error}")
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="URL of a running service; default: a stub server, which also sends errors")
    parser.add_argument("--screenshots", type=Path, help="folder for pictures of the page, light, dark and on a phone")
    arguments = parser.parse_args()
    with Chromium() as browser, stub() as (stub_url, record):
        browser.set_screen(**DESK)
        real = arguments.url is not None
        page = Playground(browser, arguments.url.rstrip("/") if real else stub_url, None if real else record)
        num_failed = run_checks(page, CHECKS if real else CHECKS + STUB_CHECKS)
        if arguments.screenshots is not None:
            take_screenshots(page, Playground(browser, stub_url, record), arguments.screenshots)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
