"""`kvasir chat` against the stub server: messages, commands, errors, and Ctrl-C in a pseudo-terminal."""

import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

import psutil
import pytest

from service.cli.main import INTERRUPTED, main
from tests.e2e.process import wait_until
from tests.playground.stub_server import ESCAPES, MODEL, REASONING, STORY, StubServer

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 60.0
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[StubServer]:
    server = StubServer(token_seconds=0.0).start()
    yield server
    server.stop()


@pytest.fixture
def chat(server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Return a function that pipes lines into `kvasir chat` and returns its exit code, stdout and stderr."""

    def run(*lines: str, flags: tuple[str, ...] = (), url: str = server.url) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        code = main(["chat", "--url", url, *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_piped_message_is_answered_on_stdout(chat: Chat, server: StubServer) -> None:
    assert chat("Hello") == (0, STORY + "\n", "")
    (body,) = server.record.bodies
    assert body == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_pipe_gets_no_reasoning(chat: Chat) -> None:
    code, answer, _ = chat("<think> Hello")
    assert code == 0
    assert answer.strip()
    assert REASONING not in answer


def test_the_conversation_the_system_prompt_and_the_sampling_flags_are_sent(chat: Chat, server: StubServer) -> None:
    flags = ("--system", "Be brief.", "--max-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--seed", "7")
    chat("One", "Two", flags=(*flags, "--stop", "END", "--model", MODEL))
    first, second = server.record.bodies
    sampling = {"max_tokens": 3, "temperature": 0.5, "top_k": 4, "seed": 7, "stop": "END"}
    assert first | sampling == first
    system, one = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}
    assert first["messages"] == [system, one]
    assert second["messages"][:2] == [system, one]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert STORY.startswith(second["messages"][2]["content"])


def test_a_backslash_and_multiline_continue_a_message(chat: Chat, server: StubServer) -> None:
    chat("one\\", "two", "/multiline", "three", "", "four", ".", "//slash", flags=("--max-tokens", "1"))
    said = [body["messages"][-1]["content"] for body in server.record.bodies]
    assert said == ["one\ntwo", "three\n\nfour", "/slash"]


def test_retry_undo_clear_and_system_change_the_conversation(chat: Chat, server: StubServer) -> None:
    lines = ("One", "/retry", "Two", "/undo", "Three", "/clear", "/system Short.", "Four", "/system none", "/retry")
    code, _, log = chat(*lines, flags=("--max-tokens", "1"))
    assert code == 0
    answer = " He"
    assert [[message["content"] for message in body["messages"]] for body in server.record.bodies] == [
        ["One"], ["One"], ["One", answer, "Two"], ["One", answer, "Three"], ["Short.", "Four"], ["Four"],
    ]  # fmt: skip
    assert "the conversation has 2 messages" in log
    assert "system prompt: Short." in log


def test_set_changes_sampling_and_rejects_bad_values(chat: Chat, server: StubServer) -> None:
    lines = ("/set temperature 0.3", "/set top_k 5", "/set top_k none", "/set", "Hello")
    _, _, log = chat(*lines, "/set temperature 9", "/set heat 1", "/set seed", flags=("--max-tokens", "1"))
    assert server.record.bodies[0]["temperature"] == 0.3
    assert "top_k" not in server.record.bodies[0]
    assert "max_tokens 1, temperature 0.3\n" in log
    errors = [line for line in log.splitlines() if line.startswith("kvasir chat: ")]
    assert errors[0].startswith("kvasir chat: temperature: must be less than or equal to 2")
    assert errors[1].startswith("kvasir chat: /set has no parameter 'heat'; choose one of max_tokens, temperature")
    assert errors[2].startswith("kvasir chat: /set needs a value")
    assert len(errors) == 3


def test_a_saved_conversation_is_continued(chat: Chat, server: StubServer, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    few = ("--max-tokens", "1")
    chat("One", f"/save {path}", flags=(*few, "--system", "Short."))
    saved = json.loads(path.read_text())
    assert saved["model"] == MODEL
    chat(f"/load {path}", "Two", flags=few)
    sent = server.record.bodies[-1]["messages"]
    assert sent == [*saved["messages"], {"role": "user", "content": "Two"}]
    path.write_text('{"messages": [{"role": "pirate", "content": 1}]}')
    code, _, log = chat(f"/load {path}", f"/load {tmp_path / 'none'}", "/save")
    assert code == 1
    assert f"kvasir chat: {path} is not a saved conversation; choose a file written by /save\n" in log
    assert "No such file" in log
    assert "/save needs a file" in log


def test_stats_show_the_speed_and_usage_of_the_last_answer(chat: Chat) -> None:
    _, _, log = chat("/stats", "Hello", "/stats")
    assert log.startswith("no answer yet\n")
    assert re.search(
        r"first token \d+ ms, \d+ tokens/s, \d+ tokens, prompt 18 \(16 cached\), \d+\.\d\d s in total", log
    )


def test_help_lists_every_command_and_an_unknown_command_is_named(chat: Chat) -> None:
    code, _, log = chat("/help", "/nonsense")
    for name in ("/clear", "/system", "/set", "/retry", "/undo", "/save", "/load", "/stats", "/multiline", "/exit"):
        assert f"\n{name} " in log
    assert "kvasir chat: there is no command /nonsense; /help lists the commands\n" in log
    assert code == 1
    assert chat("/exit", "Hello") == (0, "", "")


def test_control_characters_of_an_answer_do_not_reach_the_terminal(chat: Chat) -> None:
    _, text, _ = chat("<escapes>")
    assert text == re.sub("[\x00-\x08\x0b-\x1f\x9b\u202e]", "\N{REPLACEMENT CHARACTER}", ESCAPES) + "\n"
    assert "\x1b" not in text
    assert "👩\u200d🔬" in text


def test_a_server_that_is_not_reachable_is_one_line(chat: Chat) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    code, text, log = chat("Hello", url=url)
    assert (code, text) == (1, "")
    assert log == (
        f"kvasir chat: {url} is not reachable (Connection refused); "
        "start a server with `kvasir serve`, or choose another with --url\n"
    )
    code, _, log = chat("Hello", url="ftp://x")
    assert (code, log) == (1, "kvasir chat: ftp://x is not an address; write it as --url http://HOST:PORT\n")


def test_the_api_key_is_needed_and_sent(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    server = StubServer(key="sk-right").start()
    few = ("--max-tokens", "1")
    code, _, log = chat("Hello", url=server.url)
    assert (code, log) == (1, "kvasir chat: the server requires an API key; set KVASIR_API_KEY\n")
    monkeypatch.setenv("KVASIR_API_KEY", "sk-wrong")
    code, _, log = chat("Hello", url=server.url)
    assert (code, log) == (1, "kvasir chat: the server rejects the API key; check KVASIR_API_KEY\n")
    monkeypatch.setenv("KVASIR_API_KEY", "sk-right")
    assert chat("Hello", url=server.url + "/v1/", flags=few) == (0, " He\n", "")
    server.stop()


def test_an_unknown_model_is_one_line(chat: Chat) -> None:
    code, text, log = chat("Hello", flags=("--model", "other"))
    assert (code, text) == (1, "")
    assert log == "kvasir chat: the model other does not exist; check --model and --url\n"


def test_a_busy_server_is_asked_again_after_the_time_that_it_names(chat: Chat, server: StubServer) -> None:
    code, text, log = chat("<429> Hello", flags=("--max-tokens", "1"))
    assert (code, text) == (0, " He\n")
    assert len(server.record.bodies) == 2
    assert log == "the server is busy: the queue is full: 64 requests are waiting; next try in 2 s, Ctrl-C gives up\n"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("<400>", "the server answered with an error: top_k must not be negative, not -3; status 400"),
        ("<html>", "the server answered with an error: status 502 Bad Gateway; status 502"),
        ("<error>", "the server ended the answer: the worker failed twice on this request; /retry asks again"),
        ("<truncated>", "the stream ended before the answer was finished; /retry asks again"),
    ],
)
def test_a_failed_answer_is_one_line_and_its_message_can_be_retried(
    fault: str, error: str, chat: Chat, server: StubServer
) -> None:
    code, _, log = chat(f"{fault} Hello", "Another")
    assert (code, log) == (1, f"kvasir chat: {error}\n")
    sent = [message["content"] for message in server.record.bodies[-1]["messages"]]
    assert sent[-1] == "Another"
    assert (f"{fault} Hello" in sent) == (fault in ("<error>", "<truncated>")), "an unanswered message is replaced"


class Terminal:
    """`kvasir chat` in a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.screen = ""
        command = [sys.executable, "-m", "service.cli", "chat", "--url", url]
        self._fd, terminal = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, env=environment
        )
        os.close(terminal)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the program waits: a signal just before Python's `select` is noticed only after it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, "the program does not wait for input"
        self.type("\x03")

    def until(self, text: str) -> str:
        """Read until the screen shows `text`, and return what came before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.screen:
            assert select([self._fd], [], [], deadline - time.monotonic())[0], f"no {text!r} in {self.screen!r}"
            self.screen += os.read(self._fd, 4096).decode(errors="replace")
        before, _, self.screen = self.screen.partition(text)
        return before

    def close(self) -> int:
        """Return the exit code of the program."""
        code = self.process.wait(PATIENCE_SECONDS)
        os.close(self._fd)
        return code


@contextmanager
def terminal(server: StubServer) -> Iterator[Terminal]:
    opened = Terminal(server.url)
    try:
        opened.until("> ")
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()


def test_ctrl_c_stops_the_answer_and_the_program_goes_on(server: StubServer) -> None:
    with terminal(server) as chat:
        chat.type("<slow> Tell me a story\n")
        chat.until("He did")
        chat.interrupt()
        chat.until("[stopped]")
        chat.until("> ")
        chat.type("Go on\n")
        chat.until("every night.")
        chat.until("> ")
        assert [message["role"] for message in server.record.bodies[-1]["messages"]] == ["user", "assistant", "user"]
        assert STORY.startswith(server.record.bodies[-1]["messages"][1]["content"])
        chat.type("\x04")
        assert chat.close() == 0
    wait_until(lambda: server.record.num_left > 0, what="the server to notice the stop")


def test_ctrl_c_twice_at_the_prompt_leaves(server: StubServer) -> None:
    with terminal(server) as chat:
        chat.interrupt()
        chat.until("Press Ctrl-C again, or Ctrl-D, to leave.")
        chat.until("> ")
        chat.interrupt()
        assert chat.close() == INTERRUPTED


def test_reasoning_is_dim_and_is_not_sent_back(server: StubServer) -> None:
    with terminal(server) as chat:
        chat.type("<think>\n")
        chat.until("\x1b[2mThe user greets")
        assert f"The user greets{chat.until(chr(27) + '[0m')}" == REASONING
        chat.until("Hello! I am a stub.")
        chat.until("> ")
        chat.type("Go on\n")
        chat.until("> ")
        chat.type("\x04")
        assert chat.close() == 0
    assert server.record.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Hello! I am a stub."}
