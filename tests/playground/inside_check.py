"""Checks of the panel "Look inside" in a real browser; `browser_check.py` runs them."""

import json

from tests.playground.playground import Playground
from tests.playground.stub_server import HOSTILE, StubServer

PROMPT = "The dog did not cross the road as it was too tired."
# Number of tokens whose percentage differs from the attention weight of the selected token.
MISPLACED_WEIGHTS = """[...document.querySelectorAll('.glyph')].filter((chip, at) => {
  const weight = inside.weights[inside.token][at];
  return chip.lastChild.textContent !== (at <= inside.token && weight >= 0.005 ? percent(weight) : '');
}).length"""


def look(page: Playground, prompt: str = PROMPT) -> None:
    """Open the panel "Look inside" for a prompt and wait for the weights."""
    page.open()
    page.browser.until_script("!document.getElementById('inside-open').hidden")
    page.browser.run(f"setPrompt({json.dumps(prompt)})")
    page.browser.run("document.getElementById('inside-open').click()")
    page.browser.until_script("inside.look !== null || !document.getElementById('inside-problem').hidden")


def choose(page: Playground, name: str, value: str) -> None:
    """Select a layer or a head in its list, with the events of a user's choice."""
    page.browser.run(
        f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})"
        f"(document.getElementById('inside-{name}'))"
    )


def check_inside(page: Playground) -> None:
    look(page)
    count = page.browser.run("inside.look.tokens.length")
    assert page.browser.run("document.querySelectorAll('.glyph').length") == count > 10
    assert page.browser.run("inside.token") == count - 1
    assert page.browser.run(MISPLACED_WEIGHTS) == 0
    assert "attends most to" in page.text("inside-says")
    assert page.browser.run("document.querySelectorAll('#inside-most .percent').length") == 5
    page.browser.run("document.querySelectorAll('.glyph')[4].id = 'pointed'")
    page.browser.point_at("#pointed")
    page.browser.until_script("inside.token === 4")
    assert page.browser.run(MISPLACED_WEIGHTS) == 0
    assert page.browser.run("document.querySelectorAll('.glyph.ahead').length") == count - 5
    painted = (
        "[...document.getElementById('inside-map').getContext('2d').getImageData(0, 0, 400, 400).data].some(x => x)"
    )
    assert page.browser.run(painted)


def check_inside_layers_and_heads(page: Playground) -> None:
    look(page)
    layers = page.browser.run("inside.limits.num_layers")
    seen = set()
    for layer in (0, layers - 1):
        choose(page, "layer", str(layer))
        page.browser.until_script(f"inside.look.layer === {layer}")
        for head in ("0", "1", "mean"):
            choose(page, "head", head)
            assert page.browser.run(MISPLACED_WEIGHTS) == 0
            assert abs(page.browser.run("inside.weights.at(-1).reduce((a, b) => a + b)") - 1) < 1e-4
            seen.add(page.browser.run("JSON.stringify(inside.weights)"))
    assert len(seen) == 6, "every layer and head is another"


def check_inside_by_keyboard(page: Playground) -> None:
    look(page)
    last = page.browser.run("inside.token")
    page.browser.until_script(f"document.activeElement.dataset.index === '{last}'")
    for key, wanted in (("ArrowLeft", last - 1), ("ArrowLeft", last - 2), ("ArrowRight", last - 1)):
        page.browser.press(key)
        assert page.browser.run("inside.token") == wanted
        assert page.browser.run("document.activeElement.dataset.index") == str(wanted)
        assert page.browser.run("document.querySelectorAll('.glyph[tabindex=\"0\"]').length") == 1
        assert page.browser.run("document.activeElement.ariaPressed") == "true"
    page.browser.press("Enter", ctrl=True)
    assert page.browser.run("active === null"), "nothing is generated from within"
    page.browser.press("Escape")
    page.browser.until_script("!document.getElementById('inside').open")


def check_inside_keeps_the_layers_focus(page: Playground) -> None:
    """Changing the layer keeps the keyboard focus; only opening the panel moves the focus."""
    look(page)
    page.browser.until_script("document.activeElement.matches('.glyph')")
    page.browser.run("document.getElementById('inside-layer').focus()")
    choose(page, "layer", "0")
    page.browser.until_script("inside.look.layer === 0")
    assert page.browser.run("document.activeElement.id") == "inside-layer"
    assert "layer 0 (of 0–" in page.text("inside-detail")


def check_inside_needs_a_prompt(page: Playground) -> None:
    page.open()
    page.browser.until_script("!document.getElementById('inside-open').hidden")
    is_disabled = "document.getElementById('inside-open').disabled"
    assert not page.browser.run(is_disabled)
    page.browser.run("setPrompt('')")
    assert page.browser.run(is_disabled)
    assert page.text("inside-note") == "Write a prompt to look inside"
    page.browser.run("setPrompt('a b')")
    assert not page.browser.run(is_disabled)
    assert page.text("inside-note") == ""


def check_inside_map(page: Playground) -> None:
    look(page)
    count = page.browser.run("inside.look.tokens.length")
    for row, column in ((3, 1), (7, 7), (5, 9)):
        place = f"offsetX: ({column} + .5) / {count} * m.clientWidth, offsetY: ({row} + .5) / {count} * m.clientHeight"
        page.browser.run(f"(m => pointAtMap({{ {place} }}))(document.getElementById('inside-map'))")
        assert page.browser.run("inside.token") == row
        assert page.browser.run("inside.beside") == (column if column <= row else None)
    assert " attends most to " in page.text("inside-says"), "no token attends to later tokens"


def check_inside_fits(page: Playground) -> None:
    for width, height in ((320, 640), (390, 844), (768, 1024), (1280, 800)):
        page.browser.set_screen(width, height, phone=width < 700)
        look(page, "averyverylongword" * 7 + " and more of it" * 5)
        assert page.browser.run("inside.look !== null")
        box = "document.getElementById('inside')"
        assert page.browser.run(f"{box}.scrollWidth <= {box}.clientWidth"), f"{width} scrolls sideways"
        assert page.browser.run(f"{box}.getBoundingClientRect().bottom <= innerHeight + 1"), width
    page.browser.set_screen(1280, 800)


def check_inside_text_stays_text(page: Playground) -> None:
    title = "document.title"
    look(page, f"{HOSTILE}\n\x01\u200d é 你好 🦊")
    assert page.browser.run(title) == "Kvasir playground"
    assert page.browser.run("document.querySelector('#inside img, #inside-tokens b')") is None
    assert page.browser.run(MISPLACED_WEIGHTS) == 0


def check_inside_trouble(page: Playground) -> None:
    look(page, "<429>")
    assert page.text("inside-problem-title") == "The server is busy"
    assert "looks are under way" in page.text("inside-problem-message")
    assert page.visible("inside-retry")
    page.browser.run("setPrompt('a b')")
    page.browser.run("document.getElementById('inside-retry').click()")
    page.browser.until_script("document.activeElement.matches('.glyph')")
    assert not page.visible("inside-problem")


def check_inside_switched_off(page: Playground) -> None:
    server = StubServer(looks=False).start()
    try:
        other = Playground(page.browser, server.url, None)
        other.open()
        other.browser.until_script("document.getElementById('inside-note').textContent !== ''")
        assert other.text("inside-note") == "Look inside is disabled on this server"
        assert not other.visible("inside-open")
        assert other.generate("Once upon a time", max_tokens="5")
    finally:
        server.stop()


INSIDE_CHECKS = (
    *(check_inside, check_inside_layers_and_heads, check_inside_by_keyboard, check_inside_map, check_inside_fits),
    *(check_inside_keeps_the_layers_focus, check_inside_needs_a_prompt, check_inside_text_stays_text),
)
INSIDE_STUB_CHECKS = (check_inside_trouble, check_inside_switched_off)
