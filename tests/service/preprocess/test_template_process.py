"""A template that exceeds a limit fails with one line, and the process then renders the next conversation."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from model.chat.template_sandbox import TemplateFailure
from service.preprocess.template_process import TemplateProcess
from service.sandbox.child_process import ProcessLimits
from tests.model.chat_templates import CHATML

SMALL = ProcessLimits(cpu_seconds=0.5, memory_bytes=256 * 2**20)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = renderers()
    yield
    assert renderers() == before


def renderers() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another test's server has ended
            if "template_process" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def test_one_process_renders_successive_conversations() -> None:
    with closing(TemplateProcess("{{ messages[0].content | upper }}{{ eos_token }}")) as process:
        for content in ("a", "é 😀\n\u2028", "\ud800", "x" * 1_000_000):
            text = process.render({"messages": [{"content": content}], "eos_token": "."})
            assert text == content.upper() + "."
        assert len(renderers()) == 1


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ (9 * messages | length) ** (9 ** 9) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**11 }}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{{ '%099999999999d' % 1 }}",
        "{{ [0] * 10**11 }}",
        "{{ lipsum(n=10**9) }}",
        "{{ ''.ljust(10**11) }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_a_template_over_a_limit_fails_with_one_line(bomb: str) -> None:
    source = "{% if messages[0].content == 'boom' %}" + bomb + "{% endif %}ok"
    with closing(TemplateProcess(source, SMALL, max_characters=100_000)) as process:
        with pytest.raises(TemplateFailure) as caught:
            process.render({"messages": [{"content": "boom"}]})
        assert "\n" not in str(caught.value)
        assert str(caught.value)
        assert not caught.value.by_template
        assert process.render({"messages": [{"content": "peace"}]}) == "ok"


def test_a_template_that_compiles_too_long_fails() -> None:
    with (
        closing(TemplateProcess("{{ 9 ** (9 ** 9) }}", SMALL)) as process,
        pytest.raises(TemplateFailure, match="CPU time"),
    ):
        process.render(None)


def test_raise_exception_of_a_template_keeps_the_process() -> None:
    with closing(
        TemplateProcess("{% if not messages %}{{ raise_exception('say something') }}{% endif %}ok")
    ) as process:
        process.render(None)
        before = renderers()
        with pytest.raises(TemplateFailure, match="say something") as caught:
            process.render({"messages": []})
        assert caught.value.by_template
        assert process.render({"messages": [1]}) == "ok"
        assert renderers() == before


def test_a_syntax_error_is_reported_when_the_template_is_checked() -> None:
    with (
        closing(TemplateProcess("{% if %}")) as process,
        pytest.raises(TemplateFailure, match="line 1: Expected an expression"),
    ):
        process.render(None)


def test_a_process_that_was_killed_is_replaced() -> None:
    with closing(TemplateProcess(CHATML)) as process:
        messages = [{"role": "user", "content": "hi"}]
        text = process.render({"messages": messages})
        (pid,) = renderers()
        psutil.Process(pid).kill()
        assert process.render({"messages": messages}) == text
        assert renderers() != {pid}


def test_a_template_cannot_read_files_beside_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with (
        closing(TemplateProcess(f"{{% include '{secret}' %}}")) as process,
        pytest.raises(TemplateFailure, match="no loader"),
    ):
        process.render({})


_ENDLESS = """
from service.preprocess.template_process import TemplateProcess
from service.sandbox.child_process import ProcessLimits
loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
limits = ProcessLimits(cpu_seconds=3600, memory_bytes=2**29)
process = TemplateProcess("{% if messages %}" + loops + "{% endif %}", limits)
process.render(None)
print("checked", flush=True)
process.render({"messages": ["a"]})
"""


def test_the_rendering_process_ends_with_the_parent_process() -> None:
    with subprocess.Popen([sys.executable, "-c", _ENDLESS], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"checked\n"
        (child,) = psutil.Process(parent.pid).children()
        before = child.cpu_times().user
        while child.cpu_times().user < before + 0.1:  # until the child is rendering
            assert parent.poll() is None
        parent.kill()
    assert psutil.wait_procs([child], timeout=60)[1] == []
