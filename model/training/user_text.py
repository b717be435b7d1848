"""The user's text files of `kvasir train --corpus`, read, checked and cut into training documents."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from model.io.files import file_digest
from model.training.corpus import CONVERT, JSON_SUFFIXES, open_text, read_documents, text_suffix, word_runs
from model.training.data.bpe import END_OF_TEXT

LEAST_BYTES = 20_000
MOST_CHARACTERS = 2**30
PART_CHARACTERS = 4000
_FEWEST_PARTS = 25  # of a small text, so that some parts can be held out
_DOCUMENT_CHARACTERS = 1000  # shorter pieces on average, between blank lines, are paragraphs rather than documents
_TEXT_SUFFIXES = {".txt", ".text", ".md", *JSON_SUFFIXES}
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
# Allowed ends of a part, by preference: after a sentence, at a line's end, between words.
_ENDS = tuple(map(re.compile, (r"[.!?…。！？][\"')”’»]*(?=\s|$)|[。！？]", r"(?=\n)", r"(?=\s)")))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnText:
    """Training documents of the user's text files, without duplicates.

    digests: SHA-256 of each file, by path. form: phrase that describes the documents, for a progress line.
    """

    digests: dict[str, str]
    documents: list[str]
    form: str


def read_own_text(paths: Sequence[Path], apart: Iterable[Path] = ()) -> OwnText:
    """Read text files, and all text files in and below directories, except in and below the directories `apart`.

    Raises:
        ValueError: a file is missing or not text, a line of JSON has neither "text" nor "turns", or there is too little
            or too much text.
    """
    without = {path.resolve() for path in apart}
    files = [file for path in paths for file in _files(path, without)]
    named = str(paths[0]) if len(paths) == 1 else f"{len(files)} files"
    texts: list[str] = []
    total = 0
    for text in itertools.chain.from_iterable(map(_texts, files)):
        total += len(text)
        if total > MOST_CHARACTERS:
            raise ValueError(
                f"{named}: over {MOST_CHARACTERS:,} characters of text, the limit; give a part of the text"
            )
        texts.append(text)
    _check_size(named, num_bytes(texts), "of text")
    documents, form = _documented(texts)
    unique = list({"".join(document.lower().split()): document for document in documents}.values())
    _check_size(named, num_bytes(unique), f"of text remain after removing duplicates from {size_in_words(total)}")
    digests = {str(file): file_digest(file) for file in files}
    return OwnText(digests=digests, documents=unique, form=form)


def hold_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split documents into training documents and held-out documents, both in their order.

    Held-out documents are chosen by hash: 5% of the text, 10% below 200,000 characters, at least two documents, and
    about 120,000 characters at most. Other documents that quote a held-out document are dropped. If over half of them
    would be dropped, no document is held out.
    """
    total = sum(map(len, documents))
    wanted = min(total * (0.1 if total < 200_000 else 0.05), 120_000)
    chosen: set[int] = set()
    size = 0
    for index in sorted(range(len(documents)), key=lambda i: hashlib.blake2b(documents[i].encode()).digest()):
        if size >= wanted and len(chosen) >= 2:
            break
        chosen.add(index)
        size += len(documents[index])
    held_out = [documents[index] for index in sorted(chosen)]
    runs = {run for document in held_out for run in word_runs(document)}
    rest = [document for index, document in enumerate(documents) if index not in chosen]
    unlike = [document for document in rest if runs.isdisjoint(word_runs(document))]
    return (unlike, held_out) if 2 * len(unlike) >= len(rest) else (list(documents), [])


def _files(path: Path, without: Set[Path]) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and text_suffix(file) in _TEXT_SUFFIXES
        and without.isdisjoint(file.resolve().parents)
    )
    if not found:
        raise ValueError(
            f"{path}: a directory without text files; give files ending in .txt, .md or .jsonl, also with .xz"
        )
    return found


def _texts(path: Path) -> Iterator[str]:
    """Yield the separate texts of a file: one per JSON line, else those between end-of-text tokens or blank lines.

    Blank lines that separate short paragraphs are ignored: the file is then one text.
    """
    if text_suffix(path) in JSON_SUFFIXES:
        # JSON can hold lone surrogates, which UTF-8 cannot encode.
        yield from (document.text.encode("utf-8", "replace").decode() for _, document in read_documents(path))
        return
    with open_text(path) as file:
        text = file.read(MOST_CHARACTERS + 1)
    if "\0" in text:
        raise ValueError(f"{path}: not UTF-8 text: it has zero bytes; {CONVERT}")
    if END_OF_TEXT in text:
        yield from (part.strip("\n") for part in text.split(END_OF_TEXT))
        return
    pieces = _BLANK_LINES.split(text)
    yield from pieces if len(text) >= len(pieces) * _DOCUMENT_CHARACTERS else [text]


def _documented(texts: Sequence[str]) -> tuple[list[str], str]:
    """Cut long texts into documents of about PART_CHARACTERS or less. Also return a phrase that describes them."""
    size = max(400, min(PART_CHARACTERS, sum(map(len, texts)) // _FEWEST_PARTS))
    parts = [part for text in texts for part in ([text] if len(text) <= 3 * size else _parts(text, size))]
    documents = [part.strip("\n") for part in parts if part.strip()]
    if len(parts) == len(texts):
        return documents, f"{len(documents):,} documents"
    what = "running text" if len(texts) == 1 else f"{len(texts):,} texts"
    return documents, f"{what}, cut at sentences into {len(documents):,} documents of about {size:,} characters"


def _parts(text: str, size: int) -> Iterator[str]:
    """Cut a text into parts of `size` to 1.5 * `size` characters, at sentence ends, else line ends, else word ends."""
    start = 0
    while len(text) - start > 3 * size // 2:
        ends = (pattern.search(text, start + size, start + 3 * size // 2) for pattern in _ENDS)
        end = next((match.end() for match in ends if match), start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def _check_size(named: str, size: int, what: str) -> None:
    if size < LEAST_BYTES:
        raise ValueError(
            f"{named}: {size_in_words(size)} {what}; at least {size_in_words(LEAST_BYTES)} are needed to train a "
            f"model; give more text"
        )


def size_in_words(size: int) -> str:
    """Format a number of bytes, such as "3.4 MB", "202 KB" or "17 bytes"."""
    unit, length = ("MB", 10**6) if size >= 10**6 else ("KB", 10**3)
    return f"{size / length:.{0 if size >= 10 * length else 1}f} {unit}" if size >= length else f"{size} bytes"


def num_bytes(texts: Iterable[str]) -> int:
    """Return the total size of texts in UTF-8 bytes."""
    return sum(len(text.encode()) for text in texts)
