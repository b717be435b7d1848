"""Command `kvasir chat`: a conversation in the terminal with the model of a running server."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model.io.files import error_line, first_line
from service.cli.chat_client import ChatClient, ChatError, visible
from service.config.client_settings import ChatSettings
from service.config.settings import SettingsError

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives `input` its line editing and history)

MAX_RETRIES, MAX_RETRY_SECONDS = 2, 30.0
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
Message = dict[str, Any]


def main(settings: ChatSettings) -> int:
    """Run `kvasir chat` until the end of the input or /exit. Return 1 if a piped message or command failed, else 0."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not be in UTF-8
    key = "" if settings.api_key is None else settings.api_key.get_secret_value().strip()
    client = ChatClient(settings.url, key)
    name = client.find_model() if settings.model is None else settings.model
    return ChatSession(client, settings, name, is_interactive=sys.stdin.isatty()).run()


class ChatSession:
    """Conversation and settings of one `kvasir chat`. `messages` excludes the system prompt."""

    def __init__(self, client: ChatClient, settings: ChatSettings, model: str, *, is_interactive: bool) -> None:
        self.client = client
        self.settings = settings
        self.model = model
        self.is_interactive = is_interactive
        self.system = settings.system or ""
        self.messages: list[Message] = []
        self.stats = "no answer yet"
        self.num_failed = 0
        self._dim, self._plain = (DIM, PLAIN) if sys.stdout.isatty() else ("", "")

    def run(self) -> int:
        """Read messages and commands, and handle each, until the end of the input or /exit.

        Return the exit code: 1 if a message or command from a pipe failed, else 0. Raises KeyboardInterrupt at the
        second Ctrl-C in a row.
        """
        if self.is_interactive:
            self._note(f"{visible(self.model)} at {self.settings.url}. /help lists the commands, Ctrl-D leaves.")
        was_interrupted = False
        while True:
            try:
                if (line := self._read("> ")) is None:
                    break
                was_interrupted = False
                self._handle_line(line)
            except EOFError:
                break
            except KeyboardInterrupt:
                if was_interrupted:
                    raise
                was_interrupted = True
                self._note("\nPress Ctrl-C again, or Ctrl-D, to leave.")
        return 0 if self.is_interactive else int(self.num_failed > 0)

    def _read(self, prompt: str) -> str | None:
        """Return a line, joined with the next lines while it ends in a backslash; None at the end of the input."""
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            try:
                lines.append(input((". " if lines else prompt) if self.is_interactive else ""))
            except EOFError:
                if self.is_interactive:
                    print()
                if not lines:
                    return None
                break
        return "\n".join(line.removesuffix("\\") for line in lines)

    def _handle_line(self, line: str) -> None:
        """Run the command in a line, or send the line as a message. Print a failure, and count it for the exit code."""
        name, _, argument = line.strip().partition(" ")
        try:
            if line.startswith("/") and not line.startswith("//"):
                if (command := COMMANDS.get(name)) is None:
                    raise SettingsError(f"there is no command {name}; /help lists the commands")
                command[1](self, argument.strip())
            elif line.strip():
                self.send(line.removeprefix("/") if line.startswith("//") else line)
        except (RuntimeError, ValueError, OSError) as error:
            self.num_failed += 1
            print(f"kvasir chat: {error_line(first_line(error))}", file=sys.stderr)

    def send(self, text: str) -> None:
        """Add a message of the user to the conversation, in place of an unanswered last one, and print the answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()  # the unanswered message: many templates reject two user messages in a row
        self.messages.append({"role": "user", "content": text})
        self.answer()

    def answer(self) -> None:
        """Request an answer, print it as it arrives, and add it to the conversation.

        After Ctrl-C or an error, the part that has arrived stays in the conversation. The error is then raised.
        """
        body = {"model": self.model, "messages": self._all_messages(), **self.settings.sampling()}
        text, started, first = "", time.monotonic(), None
        is_thinking, is_stopped = False, False
        usage: dict[str, Any] = {}
        try:
            for delta in self._stream(body):
                usage = delta.get("usage") or usage
                reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
                if reasoning or content:
                    first = first or time.monotonic()
                if not self._dim:
                    reasoning = ""  # a pipe gets the answer alone
                if bool(reasoning) != is_thinking and (reasoning or content):
                    is_thinking = bool(reasoning)
                    print(self._dim if is_thinking else f"{self._plain}\n\n", end="")
                text += content
                print(visible(reasoning + content), end="", flush=True)
        except KeyboardInterrupt:
            is_stopped = True
        finally:
            if first is not None:
                print(self._plain if is_thinking else "")
            if text:
                self.messages.append({"role": "assistant", "content": text})
            self._measure(started, first, usage)
        if is_stopped:
            self._note("[stopped]")

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the deltas of an answer. If a busy server asks for a retry within 30 s, retry then, at most twice."""
        for attempt in range(MAX_RETRIES + 1):
            try:
                yield from self.client.stream(body)
                return
            except ChatError as error:
                seconds = error.retry_seconds
                if seconds is None or seconds > MAX_RETRY_SECONDS or attempt == MAX_RETRIES:
                    raise
                self._note(f"{visible(error.reason)}; next try in {seconds:.0f} s, Ctrl-C gives up")
                time.sleep(seconds)

    def _all_messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def _measure(self, started: float, first: float | None, usage: dict[str, Any]) -> None:
        ended = time.monotonic()
        parts = [] if first is None else [f"first token {1000 * (first - started):.0f} ms"]
        num_tokens = usage.get("completion_tokens", 0)
        if first is not None and num_tokens > 1 and ended > first:
            parts.append(f"{(num_tokens - 1) / (ended - first):.0f} tokens/s")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"{num_tokens} tokens, prompt {usage.get('prompt_tokens', 0)} ({cached} cached)")
        self.stats = ", ".join([*parts, f"{ended - started:.2f} s in total"])

    def _note(self, text: str) -> None:
        print(f"{self._dim}{text}{self._plain}", file=sys.stderr, flush=True)

    def show_help(self, _: str) -> None:
        """Print the list of chat commands."""
        for name, (usage, _function, text) in COMMANDS.items():
            self._note(f"{f'{name} {usage}':<18} {text}")
        self._note("A backslash at the end of a line continues the message. // begins a message with a slash.")
        self._note("Ctrl-C stops an answer. Ctrl-D, or Ctrl-C twice, leaves.")

    def clear(self, _: str) -> None:
        """Begin a new conversation. The system prompt stays."""
        self.messages.clear()
        self._note("new conversation")

    def set_system(self, text: str) -> None:
        """Set the system prompt to `text` (`none` removes it, an empty text keeps it), and show it."""
        if text:
            self.system = "" if text == "none" else text
        self._note(f"system prompt: {visible(self.system) or 'none'}")

    def set_sampling(self, text: str) -> None:
        """Set the sampling parameter in `text` ("NAME VALUE"; the value `none` unsets it), and show all set ones."""
        name, _, value = text.partition(" ")
        if name and not value:
            raise SettingsError(f"/set needs a value: /set {name} VALUE; the value none restores the server's default")
        if name:
            self.settings = self.settings.with_sampling(name, value.strip())
        given = [f"{name} {value}" for name, value in self.settings.sampling().items()]
        self._note(", ".join(given) or "the server's defaults")

    def retry(self, _: str) -> None:
        """Answer the last message of the user again, in place of its answer if it has one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise SettingsError("there is no message to answer; type one")
        self.answer()

    def undo(self, _: str) -> None:
        """Remove the last message of the user and its answer."""
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        self._note(f"the conversation has {len(self.messages)} messages")

    def save(self, name: str) -> None:
        """Write the conversation, with the system prompt, to a JSON file."""
        path = _file(name, "/save")
        path.write_text(json.dumps({"model": self.model, "messages": self._all_messages()}, indent=2) + "\n")
        self._note(f"saved {len(self.messages)} messages in {path}")

    def load(self, name: str) -> None:
        """Replace the conversation and the system prompt by those in a file written by /save."""
        path = _file(name, "/load")
        try:
            messages = json.loads(path.read_text())["messages"]
            pairs = [(message["role"], message["content"]) for message in messages]
            if not all(role in ("system", "user", "assistant") and isinstance(text, str) for role, text in pairs):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise SettingsError(f"{path} is not a saved conversation; choose a file written by /save") from None
        self.system = "\n".join(text for role, text in pairs if role == "system")
        self.messages = [{"role": role, "content": text} for role, text in pairs if role != "system"]
        self._note(f"loaded {len(self.messages)} messages")

    def show_stats(self, _: str) -> None:
        """Show the time to first token, the speed and the token counts of the last answer."""
        self._note(self.stats)

    def read_lines(self, _: str) -> None:
        """Read lines up to a line with only a dot, or the end of input. Send them as one message, unless blank."""
        self._note("end the message with a line that has only a dot")
        lines: list[str] = []
        while (line := self._read(". ")) is not None and line != ".":
            lines.append(line)
        if "".join(lines).strip():
            self.send("\n".join(lines))

    def leave(self, _: str) -> None:
        """Leave `kvasir chat`: raise EOFError, at which `run` returns."""
        raise EOFError


def _file(name: str, command: str) -> Path:
    if not name:
        raise SettingsError(f"{command} needs a file: {command} FILE")
    return Path(name).expanduser()


# Usage, function and help line of each command.
COMMANDS: dict[str, tuple[str, Callable[[ChatSession, str], None], str]] = {
    "/help": ("", ChatSession.show_help, "list the commands"),
    "/clear": ("", ChatSession.clear, "begin a new conversation; the system prompt stays"),
    "/system": ("[TEXT]", ChatSession.set_system, "show or set the system prompt; none removes it"),
    "/set": ("[NAME VALUE]", ChatSession.set_sampling, "show or set sampling: /set temperature 0.3"),
    "/retry": ("", ChatSession.retry, "answer the last message again"),
    "/undo": ("", ChatSession.undo, "remove the last message and its answer"),
    "/save": ("FILE", ChatSession.save, "write the conversation as JSON"),
    "/load": ("FILE", ChatSession.load, "continue a saved conversation"),
    "/stats": ("", ChatSession.show_stats, "time to first token, tokens/s and tokens of the last answer"),
    "/multiline": ("", ChatSession.read_lines, "write a message of several lines"),
    "/exit": ("", ChatSession.leave, "leave, as Ctrl-D does"),
}
