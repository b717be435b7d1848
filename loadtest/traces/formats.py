"""Readers of recorded traffic: Mooncake, BurstGPT, Azure's LLM inference traces, and conversations as of ShareGPT.

The format is known by the first line. An error names the file and the line.
"""

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

BLOCK_TOKENS = 512  # of a prompt, for each hash id of Mooncake's format
_Length = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """Request of a trace: time since the first request, and lengths in tokens.

    hash_ids: ids of the prompt's blocks of `BLOCK_TOKENS` tokens; empty if the trace has none. Prompts with equal
    leading ids begin with equal text.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """Texts of a recorded conversation, of user and assistant by turns. There is no time."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded traffic, either requests in the order of their time, or conversations.

    num_unusable: requests without a prompt or an answer, which are left out.
    """

    form: str
    requests: Sequence[RecordedRequest] = ()
    conversations: Sequence[RecordedConversation] = ()
    num_unusable: int = 0


class MooncakeLine(msgspec.Struct):
    """Line of Mooncake's format. `timestamp`: milliseconds."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[int] = []


def read_trace(path: Path) -> Trace:
    """Read a trace of any known format. Raises `ValueError` with the file and line of the first error."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline().strip()
            file.seek(0)
            if first.startswith("["):
                return _conversations(path, file.read())
            if first.startswith("{"):
                return _trace("Mooncake", _mooncake(path, file))
            columns = {name.strip() for name in first.split(",")}
            for form, (needed, record) in _TABLES.items():
                if needed <= columns:
                    return _trace(form, _table(path, file, record))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8: {error.reason}") from error
    known = "Mooncake's JSON lines, a table of BurstGPT or Azure, or a JSON list of conversations"
    raise ValueError(f"{path}:1: not a known trace ({known}): {first[:60]!r}")


def _trace(form: str, records: Iterable[RecordedRequest]) -> Trace:
    """Return the trace of these requests in the order of their time, which begins at 0, without unusable ones."""
    found = sorted(records, key=lambda record: record.seconds)
    usable = [record for record in found if record.prompt_tokens and record.output_tokens]
    began = usable[0].seconds if usable else 0.0
    requests = [replace(record, seconds=record.seconds - began) for record in usable]
    return Trace(form, requests, num_unusable=len(found) - len(usable))


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[RecordedRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            each = msgspec.json.decode(line, type=MooncakeLine)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        yield RecordedRequest(
            seconds=each.timestamp / 1e3,
            prompt_tokens=each.input_length,
            output_tokens=each.output_length,
            hash_ids=each.hash_ids,
        )


def _azure(row: Mapping[str, str]) -> tuple[float, str, str]:
    return datetime.fromisoformat(row["TIMESTAMP"]).timestamp(), row["ContextTokens"], row["GeneratedTokens"]


def _burstgpt(row: Mapping[str, str]) -> tuple[float, str, str]:
    return float(row["Timestamp"]), row["Request tokens"], row["Response tokens"]


# Needed columns of a table, and the time, prompt length and completion length of a row.
_TABLES: dict[str, tuple[set[str], Callable[[Mapping[str, str]], tuple[float, str, str]]]] = {
    "Azure": ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    "BurstGPT": ({"Timestamp", "Request tokens", "Response tokens"}, _burstgpt),
}


def _table(
    path: Path, lines: Iterable[str], record: Callable[[Mapping[str, str]], tuple[float, str, str]]
) -> Iterator[RecordedRequest]:
    rows = csv.DictReader(lines, skipinitialspace=True, restval="")
    for row in rows:
        try:
            seconds, prompt, output = record(row)
            lengths = int(prompt), int(output)
            if min(lengths) < 0:
                raise ValueError(f"a length is below 0: {min(lengths)}")
        except ValueError as error:
            raise ValueError(f"{path}:{rows.line_num}: {error}") from error
        yield RecordedRequest(seconds=seconds, prompt_tokens=lengths[0], output_tokens=lengths[1])


class ShareGptTurn(msgspec.Struct):
    """Text of a conversation as ShareGPT stores it."""

    role: str = msgspec.field(name="from")
    content: Any = msgspec.field(name="value")


class ChatTurn(msgspec.Struct):
    """Text of a conversation as OpenAI's API has it."""

    role: str
    content: Any = None


class StoredConversation(msgspec.Struct):
    """Conversation of a file: `conversations` as in ShareGPT, or `messages`."""

    conversations: list[ShareGptTurn] = []
    messages: list[ChatTurn] = []

    def usable(self) -> RecordedConversation | None:
        """Return the texts from the first user's on; None unless user and assistant take turns with texts."""
        said: list[ShareGptTurn | ChatTurn] = [*self.conversations, *self.messages]
        answered = itertools.dropwhile(lambda turn: turn.role not in _USER, said)
        turns = [(turn.role in _USER, turn.content) for turn in answered]
        turns = turns[: len(turns) // 2 * 2]
        is_usable = all(is_user == (number % 2 == 0) for number, (is_user, _) in enumerate(turns))
        texts = [text for _, text in turns if isinstance(text, str) and text.strip()]
        return RecordedConversation(texts) if is_usable and texts and len(texts) == len(turns) else None


_USER = ("human", "user")


def _conversations(path: Path, text: str) -> Trace:
    try:
        listed = msgspec.json.decode(text, type=list[StoredConversation])
    except msgspec.DecodeError as error:
        place = re.search(r"byte (\d+)", str(error))
        line = text.encode()[: int(place[1])].count(b"\n") + 1 if place else 1
        raise ValueError(f"{path}:{line}: {error}") from error
    found = [each.usable() for each in listed]
    usable = [each for each in found if each is not None]
    return Trace("conversations", conversations=usable, num_unusable=len(found) - len(usable))
