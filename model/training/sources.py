"""Text sources: corpora read, cut into documents, split into training and held-out documents, and decontaminated."""

import dataclasses
import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.manifest import file_digest
from model.training.config import SourceConfig
from model.training.data.conversations import Turn, conversation, transcript

# A whole book is cut into parts of about this many characters, which count as separate documents.
MAX_DOCUMENT_CHARACTERS = 8000
_BOOK_CHARACTERS = 100_000
# Shared words in a row that indicate a quotation. Brown et al. 2020 (arXiv 2005.14165, appendix C) use 13 words, but an
# encyclopedia repeats longer phrases.
RUN_WORDS = 20
_WORD = re.compile(r"[^\W_]+")


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
