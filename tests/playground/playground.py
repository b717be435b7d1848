"""Playground page in a browser, with methods for the checks."""

import json
from typing import Any

from tests.playground.chromium import Chromium
from tests.playground.stub_server import Record

STABLE = "#prompt, #chips, #generate, #stop, #copy-curl, #rail, #page, #ending, .figures, .figures td"


class Playground:
    """Playground page as a user operates it. `record` holds the stub server's requests; None for a real server."""

    def __init__(self, browser: Chromium, url: str, record: Record | None) -> None:
        self.browser = browser
        self.url = url
        self.record = record

    def open(self, state: str = "") -> None:
        """Load the page in completion mode, if the fragment `state` names no mode, and wait for the server's model."""
        mode = "" if "mode=" in state else "&mode=completion" if state else "#mode=completion"
        self.browser.open(f"{self.url}/playground{state}{mode}")
        self.browser.until_script("server.model !== null && document.getElementById('budget').textContent !== ''")

    def start(self, prompt: str, **values: str | bool) -> None:
        """Fill the form and press Ctrl+Enter in the prompt."""
        for name, value in {"prompt": prompt, **values}.items():
            set_value = f"e[e.type === 'checkbox' ? 'checked' : 'value'] = {json.dumps(value)}"
            dispatch = "e.dispatchEvent(new Event('input', { bubbles: true }))"
            self.browser.run(
                f"(e => {{ {set_value}; {dispatch}; }})(document.getElementsByName({json.dumps(name)})[0])"
            )
        self.browser.run("document.getElementById('prompt').focus()")
        self.browser.press("Enter", ctrl=True)
        self.browser.until_script("shown !== null")

    def wait(self) -> None:
        self.browser.until_script("active === null", seconds=120)

    def generate(self, prompt: str, **values: str | bool) -> str:
        """Generate a completion to its end; return its text on the page."""
        self.start(prompt, **values)
        self.wait()
        return self.text("completion")

    def text(self, element: str) -> str:
        text: str = self.browser.run(f"document.getElementById({json.dumps(element)}).textContent")
        return text

    def visible(self, element: str) -> bool:
        return bool(self.browser.run(f"document.getElementById({json.dumps(element)}).checkVisibility()"))

    def boxes(self) -> list[list[float]]:
        """Return the positions of the elements that new text must not move."""
        place = "(r => [r.x, r.y, r.width, r.height])(e.getBoundingClientRect())"
        boxes: list[list[float]] = self.browser.run(
            f"[...document.querySelectorAll({json.dumps(STABLE)})].map(e => {place})"
        )
        return boxes

    def problem(self, prompt: str) -> dict[str, Any]:
        """Generate from a prompt that makes the stub server fail; return the error that the page shows."""
        self.generate(prompt)
        assert self.visible("problem")
        return {part: self.text(f"problem-{part}") for part in ("title", "message", "detail")} | {
            "retry": self.visible("retry")
        }

    def rests(self, scroller: str) -> bool:
        """Return True if the scroll position stays while lines of text arrive."""
        place, num_chunks = self.browser.run(f"[{scroller}.scrollTop, active.numChunks]")
        self.browser.until_script(f"active.numChunks > {num_chunks + 30}")
        return bool(self.browser.run(f"{scroller}.scrollTop") == place)
