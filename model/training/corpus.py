"""Training data of a run: documents and held-out texts of each source, tokenizer, and batches of both phases.

A source is a corpus file of the recipe. The phases are pretraining and, for a chat model, training on conversations.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from model.chat.chatml import END, START, supports_chatml
from model.io.files import file_digest
from model.tokenizer.byte_level import SPEC_FILE, ByteLevelTokenizer, load_native, save_native
from model.tokenizer.interface import Tokenizer
from model.training.config import SourceConfig, TrainConfig
from model.training.data.batches import ROUND_BATCHES, Batches, Ids, Mixture, TokenizedSource
from model.training.data.bpe import train_bpe
from model.training.state import STATE_FILE

# A whole book is cut into parts of about this many characters, which count as separate documents.
MAX_DOCUMENT_CHARACTERS = 8000
_BOOK_CHARACTERS = 100_000
# Shared words in a row that indicate a quotation. Brown et al. 2020 (arXiv 2005.14165, appendix C) use 13 words, but an
# encyclopedia repeats longer phrases.
RUN_WORDS = 20
JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
CONVERT = "give plain text, or convert the text, for example with: iconv -f WINDOWS-1252 -t UTF-8"
_WORD = re.compile(r"[^\W_]+")
_SPEAKERS = {"U": "user", "S": "assistant", "T": "tool", "system": "system"}  # of corpus records
_PRETRAINING, _CHAT = 0, 1  # seed tags, so that the phases shuffle differently
_STREAM_BATCHES = ROUND_BATCHES // 8  # piece length, in batches, for a token stream: a round holds several pieces


class Turn(NamedTuple):
    """Message of a training conversation. role: one of `chatml.ROLES`."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Training text. turns: messages of a conversation, () if none of them is a reply; None for plain text."""

    text: str
    turns: tuple[Turn, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Training documents and held-out texts of one corpus file, each in file order.

    sha256: of the file. left_out: number of documents that were removed from `train`, as they quote a held-out text.
    """

    config: SourceConfig
    sha256: str
    train: list[Document]
    held_out: list[str]
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training data of a run: the texts of each source, their tokenizer, and the batches of both phases."""

    config: TrainConfig
    sources: list[TextSource]
    tokenizer: ByteLevelTokenizer

    @functools.cached_property
    def pretraining(self) -> Batches:
        """Batches of the pretraining phase: the text of every document, a conversation as its transcript."""
        return self.batches([self._tokenized(s, s.config.repeats) for s in self.sources], _PRETRAINING)

    @functools.cached_property
    def chat(self) -> Batches:
        """Batches of the chat phase: conversations, and the plain text of documents without turns."""
        return self.batches([self._tokenized(s, s.config.chat_repeats, chat=True) for s in self.sources], _CHAT)

    @property
    def first_phase(self) -> Batches:
        """Batches that the run begins with: those of the pretraining phase, if it has one."""
        return self.chat if self.config.is_all_chat else self.pretraining

    def _tokenized(self, source: TextSource, repeats: float, *, chat: bool = False) -> TokenizedSource:
        bos = self.tokenizer.bos_token_id
        assert bos is not None  # `train_bpe` always sets it
        ids: list[Ids] = [np.zeros(0, dtype=np.uint16)]
        trained = [np.zeros(0, dtype=np.bool_)]
        for document in source.train if repeats else []:
            turns = document.turns if chat and not source.config.as_text else None
            if turns == ():
                continue
            if turns:
                token_ids, targets = encode_conversation(self.tokenizer, turns)
            else:
                token_ids = [bos, *self.tokenizer.encode(document.text), bos]
                targets = [True] * len(token_ids)
            ids.append(np.array(token_ids, dtype=np.uint16))
            trained.append(np.array(targets))
        starts: NDArray[np.int64] = np.cumsum([len(document) for document in ids])
        return TokenizedSource(
            token_ids=np.concatenate(ids), starts=starts, trained=np.concatenate(trained), repeats=repeats
        )

    def batches(self, sources: Sequence[TokenizedSource], tag: int = _PRETRAINING) -> Batches:
        """Return the batches of tokenized sources. tag: number of the phase, a part of the seed that shuffles texts."""
        config = self.config
        length = config.sequence_length if config.mask_documents else _STREAM_BATCHES * config.tokens_per_step
        round_length = ROUND_BATCHES * config.tokens_per_step
        return Batches(
            Mixture(sources, piece_length=length, round_length=round_length, seed=config.seed, tag=tag),
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            documents=config.mask_documents,
        )


def read_corpus(config: TrainConfig, directory: Path, report: Callable[[str], None]) -> Corpus:
    """Read and tokenize the corpus files of a run. Load the tokenizer from `directory`, after copying that of
    `start_from` there or training one, if `directory` has none.

    Raises:
        ValueError: a corpus file is unusable or too small, or `directory` holds another recipe's tokenizer.
        CheckpointError: the tokenizer of `start_from` is missing or damaged.
    """
    sources = leave_out_held_out(map(read_source, config.sources))
    for source in sources:
        if source.left_out:
            reason = "left out because they quote held-out texts"
            report(f"{source.config.name}: {source.left_out:,} training documents {reason}")
        if config.chat_steps and source.config.chat_repeats and not any(d.turns != () for d in source.train):
            raise ValueError(f"{source.config.path}: no conversation has an answer; set chat_repeats = 0")
    corpus = Corpus(config=config, sources=sources, tokenizer=_tokenizer(config, sources, directory, report))
    total = corpus.first_phase.mixture.epoch_length
    epochs = (config.chat_start or config.steps) * config.tokens_per_step / total
    report(f"{total:,} tokens per epoch, {epochs:.1f} epochs; model of {config.model.num_parameters:,} parameters")
    return corpus


def _tokenizer(
    config: TrainConfig, sources: Sequence[TextSource], directory: Path, report: Callable[[str], None]
) -> ByteLevelTokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    if config.start_from and not (directory / STATE_FILE).exists():
        # Until the first save, a tokenizer in the directory may be that of another attempt.
        save_native(load_native(config.start_from[0]), directory)
    if not (directory / SPEC_FILE).exists():  # the spec is written last
        report(f"training a tokenizer of {config.vocab_size:,} tokens")
        used = (s for s in sources if (s.config.chat_repeats if config.is_all_chat else s.config.repeats))
        texts = (document.text for source in used for document in source.train)
        save_native(train_bpe(texts, config.vocab_size, chat=config.chat_steps > 0), directory)
    tokenizer = load_native(directory)
    size = tokenizer.vocab_size
    origin, other = str(directory), "use another --run-directory"
    if config.start_from:
        origin, other = f"start_from {config.start_from[0]}", "start from another checkpoint"
    if config.chat_steps and not supports_chatml(tokenizer.special_tokens):
        raise ValueError(f"{origin}: its tokenizer has no ChatML tokens; set chat_steps = 0, or {other}")
    if size > config.vocab_size or (config.start_from and size < config.vocab_size):
        raise ValueError(
            f"{origin}: its tokenizer has {size} tokens, not {config.vocab_size}; set vocab_size = {size}, or {other}"
        )
    if size < config.vocab_size:
        # Otherwise the model could sample token ids that the tokenizer does not have.
        raise ValueError(f"tokenizer: the texts yield only {size} tokens: set vocab_size = {size}, or give more text")
    return tokenizer


def check_sources(sources: Iterable[SourceConfig]) -> None:
    """Check that the corpus file of every source can be opened, before a long read; raise ValueError if not."""
    for source in sources:
        path = source.path.resolve()
        try:
            path.open("rb").close()
        except OSError as error:
            advice = f"correct the path of source {source.name}; docs/training.md lists the corpora of shipped recipes"
            raise ValueError(f"{path}: {error.strerror}; {advice}") from error


def read_source(config: SourceConfig) -> TextSource:
    """Read a corpus file, and split its documents into training documents and held-out texts.

    Documents are held out by `held_out_ids` and by the hash of their text, so a growing file keeps its held-out texts.

    Raises:
        ValueError: the file is missing, empty or invalid, or lacks a document of `held_out_ids`.
    """
    train: list[Document] = []
    held_out: list[str] = []
    missing = set(config.held_out_ids)
    for record_id, document in read_documents(config.path):
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
    if missing:
        raise ValueError(f"{config.path}: no document has the id {sorted(missing)[0]!r}; remove it from held_out_ids")
    if not train and not held_out:
        raise ValueError(f"{config.path}: contains no documents; give a file with text")
    return TextSource(config=config, sha256=file_digest(config.path), train=train, held_out=held_out)


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
    """Yield the hash of each run of RUN_WORDS words of a text, or one hash of a text with fewer words.

    The hashes are comparable only within one process.
    """
    words = _WORD.findall(text.lower()) or [text.strip()]  # a text of emoji only counts as one word
    for start in range(max(1, len(words) - RUN_WORDS + 1)):
        yield hash(tuple(words[start : start + RUN_WORDS]))


def _share(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") / 2**64


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Context manager: open a UTF-8 text file, decompressed if its suffix is .xz.

    Raises ValueError if the file cannot be opened or read, or is not text.
    """
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path}: truncated or damaged xz file; download or compress it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}; {CONVERT}") from error


def text_suffix(path: Path) -> str:
    """Return the suffix of a text file before a possible .xz: ".txt" for "a.txt" and for "a.txt.xz"."""
    return (path.with_suffix("") if path.suffix == ".xz" else path).suffix


def read_documents(path: Path) -> Iterator[tuple[str, Document]]:
    """Yield the "id" and the document of each record of a corpus file. The text of a conversation is its transcript.

    Blank lines separate the documents of a plain text, which have the id "". A JSON record without an id has the id
    "None". Raises ValueError for a file that cannot be read, or a line that is not a record.
    """
    with open_text(path) as file:
        if text_suffix(path) not in JSON_SUFFIXES:
            for text in file.read().split("\n\n"):
                yield "", Document(text=text)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record: dict[str, Any] = json.loads(line)
                turns = conversation(record["turns"]) if "turns" in record else None
                text = record["text"] if turns is None else _transcript(record["turns"])
                if not isinstance(text, str):
                    raise TypeError('"text" is not a string')
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f'{path}, line {number}: expected a JSON object with a "text" or with "turns", a list of '
                    f"[speaker, text]"
                ) from error
            yield str(record.get("id")), Document(text=text, turns=turns)


def _parts(text: str) -> Iterator[str]:
    """Cut a text at line ends into parts of about MAX_DOCUMENT_CHARACTERS. Texts up to twice as long are not cut."""
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


def _transcript(turns: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"{_SPEAKERS[speaker].capitalize()}: {text.strip()}" for speaker, text in turns)


def conversation(turns: Sequence[Sequence[str]]) -> tuple[Turn, ...]:
    """Return the "turns" of a corpus record as messages; () if the assistant does not reply to any user message.

    The first message is the user's, optionally after a system message, and the last message is the assistant's.
    Consecutive messages of one role are joined. No text is empty, or starts or ends with white space.
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
    """Return the token ids of a conversation, as the chat template renders it and with BOS appended, and its loss mask.

    The mask is True for the tokens of the assistant's messages and the `<|im_end|>` after each. The text of a message
    never becomes a special token.
    """
    begin, start, end = tokenizer.bos_token_id, tokenizer.special_tokens[START], tokenizer.special_tokens[END]
    assert begin is not None  # `train_bpe` always sets it
    line_break = tokenizer.encode("\n")
    ids, targets = [begin], [False]
    for role, text in turns:
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
