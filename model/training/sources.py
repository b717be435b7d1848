"""Text sources: documents and conversations of a corpus, split into training and held-out documents."""

import dataclasses
import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from model.chat.chatml import END, ROLES, START
from model.io.files import file_digest
from model.tokenizer.interface import Tokenizer
from model.training.config import SourceConfig

# A whole book is cut into parts of about this many characters, which count as separate documents.
MAX_DOCUMENT_CHARACTERS = 8000
_BOOK_CHARACTERS = 100_000
# Shared words in a row that indicate a quotation. Brown et al. 2020 (arXiv 2005.14165, appendix C) use 13 words, but an
# encyclopedia repeats longer phrases.
RUN_WORDS = 20
_WORD = re.compile(r"[^\W_]+")
_SPEAKERS = {"U": "user", "S": "assistant", "system": "system"}  # of corpus records


class Turn(NamedTuple):
    """One message: role (`system`, `user` or `assistant`) and text."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text. turns: the conversation of a record with "turns"; empty if it has no answer; None for plain text."""

    text: str
    turns: tuple[Turn, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """One corpus in file order. left_out: number of training documents that quote a held-out text."""

    config: SourceConfig
    sha256: str
    train: list[Document]
    held_out: list[str]
    left_out: int = 0


def check_sources(sources: Iterable[SourceConfig]) -> None:
    """Check that the files of all sources can be opened. The check is cheap, so it runs first.

    Raises:
        ValueError: a file cannot be opened.
    """
    for source in sources:
        path = source.path.resolve()
        try:
            path.open("rb").close()
        except OSError as error:
            advice = f"correct the path of source {source.name}; docs/training.md lists the corpora of shipped recipes"
            raise ValueError(f"{path}: {error.strerror}; {advice}") from error


def read_source(config: SourceConfig) -> TextSource:
    """Read a corpus and split it by `id` and by document hash, so that a growing file keeps its split.

    Raises:
        ValueError: the file is missing, empty or invalid, or lacks a document of `held_out_ids`.
    """
    train: list[Document] = []
    held_out: list[str] = []
    missing = set(config.held_out_ids)
    try:
        for record_id, document in _documents(config.path):
            missing.discard(record_id)
            # A dialogue stays whole, since its turns cannot be assigned to parts.
            for part in [document.text] if document.turns is not None else _parts(document.text):
                hashed = document.text if len(document.text) <= _BOOK_CHARACTERS else part
                if not part.strip():
                    continue
                if record_id in config.held_out_ids or _share(hashed) < config.held_out:
                    held_out.append(part)
                elif config.repeats or config.chat_repeats:
                    train.append(Document(text=part, turns=document.turns))
        digest = file_digest(config.path)
    except OSError as error:
        raise ValueError(f"{config.path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{config.path}: not UTF-8 text: {error}") from error
    if missing:
        raise ValueError(f"{config.path}: no document has the id {sorted(missing)[0]!r} of held_out_ids")
    if not train and not held_out:
        raise ValueError(f"{config.path}: contains no documents")
    return TextSource(config=config, sha256=digest, train=train, held_out=held_out)


def leave_out_held_out(sources: Iterable[TextSource]) -> list[TextSource]:
    """Remove training documents that share RUN_WORDS consecutive words with a held-out text of any source.

    Words are compared without case, punctuation and spaces. Texts with fewer words are compared as a whole.
    """
    sources, cleaned = list(sources), []
    held_out = {run for source in sources for text in source.held_out for run in word_runs(text)}
    for source in sources:
        kept = [text for text in source.train if not held_out or held_out.isdisjoint(word_runs(text.text))]
        cleaned.append(dataclasses.replace(source, train=kept, left_out=len(source.train) - len(kept)))
    return cleaned


def word_runs(text: str) -> Iterator[int]:
    """Yield the hash of each run of RUN_WORDS words, or one hash of a text with fewer words."""
    words = _WORD.findall(text.lower()) or [text.strip()]  # a text of emoji only counts as one word
    for start in range(max(1, len(words) - RUN_WORDS + 1)):
        yield hash(tuple(words[start : start + RUN_WORDS]))


def _share(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") / 2**64


def _documents(path: Path) -> Iterator[tuple[str, Document]]:
    """Yield the id of each record of a file, and its document. The text of a dialogue is its transcript."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if ".jsonl" not in path.suffixes:
            for text in file.read().split("\n\n"):
                yield "", Document(text=text)
            return
        for number, line in enumerate(file, start=1):
            try:
                record: dict[str, Any] = json.loads(line)
                turns = conversation(record["turns"]) if "turns" in record else None
                text = record["text"] if turns is None else transcript(record["turns"])
                if not isinstance(text, str):
                    raise TypeError("not a string")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f'{path}, line {number}: expected a JSON object with a "text" or "turns"') from error
            yield str(record.get("id")), Document(text=text, turns=turns)


def _parts(text: str) -> Iterator[str]:
    """Cut a long text at line ends into parts of about MAX_DOCUMENT_CHARACTERS; a shorter text is one part."""
    if len(text) <= 2 * MAX_DOCUMENT_CHARACTERS:
        yield text
        return
    lines: list[str] = []
    length = 0
    for line in text.splitlines():
        lines.append(line)
        length += len(line)
        if length >= MAX_DOCUMENT_CHARACTERS:
            yield "\n".join(lines)
            lines, length = [], 0
    if lines:
        yield "\n".join(lines)


def transcript(turns: Sequence[Sequence[str]]) -> str:
    """Return the turns of a record as text: a line per turn, after the speaker's role."""
    return "\n".join(f"{_SPEAKERS[speaker].capitalize()}: {text.strip()}" for speaker, text in turns)


def conversation(turns: Sequence[Sequence[str]]) -> tuple[Turn, ...]:
    """Return a record's turns as a conversation; empty if it has no question with an answer.

    The user is first, optionally after a system message, and the assistant is last. Consecutive messages of one role
    are joined. No text is empty, or starts or ends with white space.
    """
    spoken = [(_SPEAKERS[speaker], text.strip()) for speaker, text in turns if text.strip()]
    joined = [Turn(role, " ".join(text for _, text in said)) for role, said in groupby(spoken, lambda pair: pair[0])]
    first = 1 if joined and joined[0].role == "system" else 0
    if len(joined) > first and joined[first].role == "assistant":
        del joined[first]
    while joined and joined[-1].role != "assistant":
        joined.pop()
    return tuple(joined)


def encode_conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and its loss mask.

    The ids are those of the rendered chat template, so that training and serving see the same context. The BOS token is
    appended at the end. Targets are the assistant's messages and the `<|im_end|>` after each. Message texts never
    become special tokens.

    Raises:
        KeyError: the tokenizer has no ChatML tokens.
        ValueError: the tokenizer has no BOS token, or a role is not in `model.chat.chatml.ROLES`.
        TokenizerError: a text cannot be encoded.
    """
    begin, start, end = tokenizer.bos_token_id, tokenizer.special_tokens[START], tokenizer.special_tokens[END]
    if begin is None:
        raise ValueError("the tokenizer has no BOS token")
    line_break = tokenizer.encode("\n")
    ids, targets = [begin], [False]
    for role, text in turns:
        if role not in ROLES:
            raise ValueError(f"the role {role!r} is not one of {', '.join(ROLES)}")
        head, said = tokenizer.encode(f"{role}\n"), tokenizer.encode(f"{role}\n{text}")
        ids += [start, *said, end, *line_break]
        if role == "assistant":
            # A text that starts with line breaks may share a token with the head. A generation prompt never ends with
            # this token, so it is a target.
            num_head = next((i for i, (a, b) in enumerate(zip(head, said, strict=False)) if a != b), len(head))
            targets += [False] * (1 + num_head) + [True] * (len(said) - num_head + 1) + [False] * len(line_break)
        else:
            targets += [False] * (len(said) + 2 + len(line_break))
    return [*ids, begin], [*targets, False]
