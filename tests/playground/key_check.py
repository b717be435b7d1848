"""Browser checks of the playground with a server that requires an API key."""

import json

from tests.playground.playground import Playground
from tests.playground.stub_server import STORY, StubServer

KEY = "sk-0123456789abcdef"
READINESS = "document.getElementById('readiness').textContent"


def check_key(page: Playground) -> None:
    server = StubServer(key=KEY).start()
    other = Playground(page.browser, server.url, server.record)
    try:
        other.browser.open(f"{server.url}/playground#mode=completion")
        other.browser.until_script(f"{READINESS} === 'requires an API key'")
        assert other.visible("key")
        assert other.problem("Once upon a time")["title"] == "This server requires an API key"
        type_key(other, "wrong")
        other.browser.until_script(f"{READINESS} === 'requires an API key'")
        type_key(other, f" {KEY} ")
        other.browser.until_script("server.model !== null && inside.limits !== null")
        assert other.generate("Once upon a time", max_tokens="200") == STORY
        other.browser.run("document.getElementById('reset').click()")
        other.open()
        assert other.browser.run("document.getElementById('key').value") == KEY, "the tab still has it"
        assert other.generate("Once upon a time", max_tokens="200") == STORY
        copies = [other.browser.run(script) for script in ("curlCommand({})", "pythonProgram({})", "location.href")]
        assert KEY not in "".join(copies)
        assert KEY not in other.browser.run("JSON.stringify(localStorage)"), "the key is never kept beyond the tab"
        assert "$OPENAI_API_KEY" in copies[0]
    finally:
        server.stop()


def check_no_key(page: Playground) -> None:
    page.open()
    assert not page.visible("key")


def type_key(page: Playground, key: str) -> None:
    events = "['input', 'change'].forEach(kind => e.dispatchEvent(new Event(kind, { bubbles: true })))"
    page.browser.run(f"(e => {{ e.value = {json.dumps(key)}; {events}; }})(document.getElementById('key'))")


KEY_STUB_CHECKS = (check_no_key, check_key)
