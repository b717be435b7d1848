"""Static checks of the playground page. Its behaviour is checked by `python -m tests.playground.browser_check`."""

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest

from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest

PAGE = Path(__file__).parents[2] / "service" / "api" / "playground" / "index.html"
Attributes = dict[str, str | None]


class _Elements(HTMLParser):
    """HTML parser that collects every element's tag and attributes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Attributes]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script(page: str) -> str:
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    return script


@pytest.fixture(scope="module")
def elements(page: str) -> list[tuple[str, Attributes]]:
    return _Elements(page).elements


@pytest.fixture(scope="module")
def ids(elements: list[tuple[str, Attributes]]) -> set[str]:
    counts = Counter(attributes["id"] for _, attributes in elements if attributes.get("id"))
    assert set(counts.values()) == {1}, "an id names one element"
    return {name for name in counts if name is not None}


@pytest.fixture(scope="module")
def numbers(elements: list[tuple[str, Attributes]]) -> list[Attributes]:
    return [attributes for tag, attributes in elements if tag == "input" and attributes["type"] == "number"]


def test_the_page_loads_nothing_from_other_servers(page: str, elements: list[tuple[str, Attributes]]) -> None:
    assert not re.findall(r"https?://|@import|url\(|\bimport\(|importScripts", page)
    for tag, attributes in elements:
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), f"<{tag} {name}> loads something"


def test_the_content_security_policy_forbids_other_servers(elements: list[tuple[str, Attributes]]) -> None:
    policies = [a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy"]
    directives = dict(part.split(maxsplit=1) for part in (policies[0] or "").split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["connect-src"] == "'self'"
    inline = {"style-src", "script-src"}
    assert all(directives[name] == "'unsafe-inline'" for name in inline)
    assert set(directives) == {"default-src", "connect-src", "img-src", "base-uri", "form-action"} | inline


def test_the_script_never_inserts_text_as_html(script: str, elements: list[tuple[str, Attributes]]) -> None:
    ways_to_make_elements_of_text = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|srcdoc|DOMParser"
    ways_to_run_text = r"\beval\(|new Function|set(?:Timeout|Interval)\(\s*[\"'`]|createContextualFragment|javascript:"
    assert not re.findall(f"{ways_to_make_elements_of_text}|{ways_to_run_text}", script)
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]


def test_every_element_id_in_the_script_exists(script: str, ids: set[str]) -> None:
    named = set(re.findall(r"\$\(\"([^\"]+)\"\)", script))
    assert len(named) > 20, "the script's way to find an element has changed: so must this test"
    assert named <= ids
    figures = {
        f"{row}-{name}" for row, name in product(("seen", "told"), ("first", "between", "rate", "total", "tokens"))
    }
    assert figures <= ids


def test_the_api_key_is_sent_only_to_the_server(script: str, elements: list[tuple[str, Attributes]]) -> None:
    (key,) = [attributes for tag, attributes in elements if attributes.get("id") == "key"]
    assert key["type"] == "password"
    assert "name" not in key, "what has a name is put into links and requests"
    assert len(re.findall(r"\bfetch\(", script)) == 1, "all is asked by the one function that adds the key"
    assert re.findall(r"\$\{apiKey\}", script) == ["${apiKey}"]
    assert len(re.findall(r"localStorage\.setItem\(", script)) == 1, "all is kept by the one function `keep`"
    assert not [line for line in script.splitlines() if "apiKey" in line and re.search(r"localStorage|\bkeep\(", line)]


def test_every_reference_between_elements_exists(elements: list[tuple[str, Attributes]], ids: set[str]) -> None:
    references = ("for", "data-for", "aria-labelledby", "aria-describedby", "aria-controls")
    named = {a[name] for _, a in elements for name in references if name in a}
    assert named
    assert named <= ids


def test_every_control_has_an_accessible_name(page: str, elements: list[tuple[str, Attributes]]) -> None:
    labelled = {attributes["for"] for tag, attributes in elements if tag == "label" and "for" in attributes}
    for tag, attributes in elements:
        if tag in ("input", "textarea") and attributes.get("aria-hidden") != "true":
            wrapped = re.search(rf"<label[^>]*><[^>]*id=\"{attributes['id']}\"[^>]*> \w", page)
            assert attributes["id"] in labelled or wrapped, attributes["id"]


def test_the_service_knows_every_field_that_the_page_sends(script: str, elements: list[tuple[str, Attributes]]) -> None:
    from_controls = {a["name"] for tag, a in elements if tag in ("input", "textarea") and a.get("name")}
    from_script = set(re.findall(r"\brequest\.(\w+) = ", script))
    assert from_script >= {"model", "prompt", "messages", "stop", "logprobs", "stream", "stream_options"}
    of_chat = {"messages", "tools", "top_logprobs"}
    assert (from_controls | from_script) - of_chat <= set(CompletionRequest.model_fields)
    assert (from_controls | from_script) - {"prompt"} <= set(ChatCompletionRequest.model_fields)


@pytest.mark.parametrize("end", ["value", "min", "max"])
def test_the_service_accepts_every_value_of_the_controls(end: str, numbers: list[Attributes]) -> None:
    values = {str(a["name"]): json.loads(a.get(end) or "null") for a in numbers}
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert set(values) == {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"} | penalties
    options = {"stream": True, "stream_options": {"include_usage": True}, "stop": ["\n", "The end"], "logprobs": 5}
    request = CompletionRequest.parse(json.dumps({"prompt": "Once", **options, **values}).encode())
    assert {name: getattr(request, name) for name in values} == values
