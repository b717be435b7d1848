"""Text sources: corpora read, cut into documents, and split into training and held-out documents."""

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.manifest import file_digest
from model.training.data.source_config import SourceConfig

# A whole book is cut into parts of about this many characters, which count as separate documents.
MAX_DOCUMENT_CHARACTERS = 8000
_BOOK_CHARACTERS = 100_000
_SPEAKERS = {"U": "User", "S": "Assistant"}
# The directory of the corpora of this repository's recipes.
_CORPORA = Path(__file__).resolve().parents[3] / "data"


class CorpusError(ValueError):
    """A corpus cannot be trained on. The message names the file and what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, and its corpus record. For a part of a book, the record holds the text of this part."""

    text: str
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One corpus, split into training and held-out documents, both in file order.

    left_out: number of removed training documents that quote held-out texts, see `model.training.data.contamination`.
    """

    config: SourceConfig
    sha256: str
    train: list[Document]
    held_out: list[str]
    left_out: int = 0


def check_sources(sources: Iterable[SourceConfig]) -> None:
    """Check that the files of all sources can be opened. The check is cheap, so it runs first.

    Raises:
        CorpusError: a file cannot be opened.
    """
    for source in sources:
        path = source.path.resolve()
        try:
            path.open("rb").close()
        except FileNotFoundError as error:
            is_repository_corpus = _CORPORA in path.parents or _CORPORA.resolve() in path.parents
            advice = (
                "the corpora are not part of this repository, docs/training.md lists them"
                if is_repository_corpus
                else f"correct the path of source {source.name}, which starts at the directory of its recipe"
            )
            raise CorpusError(f"{path}: no such file; {advice}") from error
        except OSError as error:
            raise CorpusError(f"{path}: {error.strerror}; it is the path of source {source.name}") from error


def read_source(config: SourceConfig) -> Source:
    """Read a corpus and split it by `id` and by document hash, so that a growing file keeps its split.

    Raises:
        CorpusError: the file is missing, empty, not UTF-8 text, or has a JSON line without "text" or "turns"; or it
            lacks a document of `held_out_ids`.
    """
    train: list[Document] = []
    held_out: list[str] = []
    missing = set(config.held_out_ids)
    try:
        for record in _records(config.path):
            # A dialogue stays whole, since its turns cannot be assigned to parts.
            parts = [record["text"]] if "turns" in record else _parts(record["text"])
            if str(record.get("id")) in config.held_out_ids:
                missing.discard(str(record["id"]))
                held_out.extend(part for part in parts if part.strip())
                continue
            for part in parts:
                if not part.strip():
                    continue
                if _share(record["text"] if len(record["text"]) <= _BOOK_CHARACTERS else part) < config.held_out:
                    held_out.append(part)
                elif config.is_trained_on:
                    train.append(Document(text=part, record={**record, "text": part}))
        digest = file_digest(config.path)
    except OSError as error:
        raise CorpusError(f"{config.path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise CorpusError(f"{config.path}: not UTF-8 text: {error}") from error
    if missing:
        raise CorpusError(f"{config.path}: no document has the id {sorted(missing)[0]!r} of held_out_ids")
    if not train and not held_out:
        raise CorpusError(f"{config.path}: contains no documents")
    return Source(config=config, sha256=digest, train=train, held_out=held_out)


def _share(text: str) -> float:
    """Hash a text to a number from 0 to 1."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") / 2**64


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, each with a "text". The text of a dialogue is its transcript."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if ".jsonl" not in path.suffixes:
            for text in file.read().split("\n\n"):
                yield {"text": text}
            return
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                text = transcript(record["turns"]) if "turns" in record else record["text"]
                if not isinstance(text, str):
                    raise TypeError("not a string")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CorpusError(f'{path}, line {number}: expected a JSON object with a "text" or "turns"') from error
            yield {**record, "text": text}


def transcript(turns: Iterable[tuple[str, str | list[str]]]) -> str:
    """Return a dialogue as text: a line per turn, after the speaker's name. Of several wordings the first is used."""
    worded = ((speaker, text if isinstance(text, str) else text[0]) for speaker, text in turns)
    return "\n".join(f"{_SPEAKERS[speaker]}: {text.strip()}" for speaker, text in worded)


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
