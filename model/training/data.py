"""Sources, held-out splits and batches: a pure function of files, seed and step.

Documents are tokenized once, end with the end-of-text mark, and are laid end to end in an order drawn for each epoch;
windows of `sequence_length + 1` are cut from that stream. Batch number i is therefore always the same, whoever asks
and whenever, which is what makes an interrupted run resume exactly.
"""

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.manifest import file_digest
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.training.config import SourceConfig

Ids = NDArray[np.uint16]
MAX_DOCUMENT_CHARACTERS = 8000
# Where the recipes of this repository look for theirs.
_CORPORA = Path(__file__).resolve().parents[2] / "data"


class CorpusError(ValueError):
    """A corpus cannot be trained on. The message names the file and what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One corpus, read and split. Texts, in file order."""

    config: SourceConfig
    sha256: str
    train: list[str]
    held_out: list[str]


def check_sources(sources: Iterable[SourceConfig]) -> None:
    """Raises CorpusError: the file of one of them cannot be opened. Costs nothing, so it comes before all else."""
    for source in sources:
        path = source.path.resolve()
        try:
            path.open("rb").close()
        except FileNotFoundError as error:
            ours = _CORPORA in path.parents or _CORPORA.resolve() in path.parents
            advice = (
                "the corpora are not part of this repository, docs/training.md lists them"
                if ours
                else f"correct the path of source {source.name}, which starts at the directory of its recipe"
            )
            raise CorpusError(f"{path}: no such file; {advice}") from error
        except OSError as error:
            raise CorpusError(f"{path}: {error.strerror}; it is the path of source {source.name}") from error


def read_source(config: SourceConfig) -> Source:
    """Read a corpus and split it by each document's own hash, so that a grown file keeps its split.

    Raises:
        CorpusError: the file is missing, empty, or not UTF-8 text or JSON lines with a "text" or "turns" each.
    """
    try:
        texts = [text for text in _documents(config.path) if text.strip()]
        digest = file_digest(config.path)
    except OSError as error:
        raise CorpusError(f"{config.path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise CorpusError(f"{config.path}: not UTF-8 text: {error}") from error
    if not texts:
        raise CorpusError(f"{config.path}: no documents in it")
    train: list[str] = []
    held_out: list[str] = []
    for text in texts:
        share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
        (held_out if share < config.held_out else train).append(text)
    return Source(config=config, sha256=digest, train=train if config.repeats else [], held_out=held_out)


def _documents(path: Path) -> Iterator[str]:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if ".jsonl" not in path.suffixes:
            for text in file.read().split("\n\n"):
                yield from _parts(text)
            return
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError("not a string")
                yield from _parts(text)
            except (ValueError, KeyError, TypeError) as error:
                raise CorpusError(f'{path}, line {number}: expected a JSON object with a "text"') from error


def _parts(text: str) -> Iterator[str]:
    """A whole book is cut at line ends into parts of about MAX_DOCUMENT_CHARACTERS; anything shorter is one part."""
    if len(text) <= 2 * MAX_DOCUMENT_CHARACTERS:
        yield text
        return
    lines: list[str] = []
    for line in text.splitlines():
        lines.append(line)
        if sum(map(len, lines)) >= MAX_DOCUMENT_CHARACTERS:
            yield "\n".join(lines)
            lines = []
    yield "\n".join(lines)


def remove_held_out(sources: list[Source]) -> list[Source]:
    """The sources without training documents whose text, letters and digits only, is held out anywhere."""
    held_out = {_normalised(text) for source in sources for text in source.held_out}
    return [
        Source(
            config=source.config,
            sha256=source.sha256,
            train=[text for text in source.train if _normalised(text) not in held_out],
            held_out=source.held_out,
        )
        for source in sources
    ]


def _normalised(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def encode_documents(tokenizer: ByteLevelTokenizer, texts: list[str]) -> list[Ids]:
    """Each text's ids, the end-of-text mark last."""
    (end,) = tokenizer.eos_token_ids
    return [np.array([*tokenizer.encode(text), end], dtype=np.uint16) for text in texts]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Documents with their repeats, and the windows cut from them."""

    documents: list[Ids]
    repeats: list[int]
    sequence_length: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise CorpusError(
                f"{self.num_tokens} training tokens: a single window needs {self.sequence_length + 1}; "
                "give more text or a shorter sequence_length"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch, repeats included."""
        return sum(len(ids) * count for ids, count in zip(self.documents, self.repeats, strict=True))

    @property
    def num_windows(self) -> int:
        """Windows in one epoch; the stream's remainder is left out, another part each epoch."""
        return (self.num_tokens - 1) // self.sequence_length

    def epoch(self, number: int) -> NDArray[np.uint16]:
        """Epoch `number` as (num_windows, sequence_length + 1): the last id of a window begins the next."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        order = np.repeat(np.arange(len(self.documents)), self.repeats)
        generator.shuffle(order)
        stream = np.concatenate([self.documents[index] for index in order])
        length = self.sequence_length
        starts = np.arange(self.num_windows) * length
        windows: NDArray[np.uint16] = stream[starts[:, None] + np.arange(length + 1)]
        generator.shuffle(windows)
        return windows


class Batches:
    """Batch i of a run, for any i; only the epochs at hand are kept in memory."""

    def __init__(self, data: TrainingData, batch_size: int) -> None:
        self._data = data
        self._batch_size = batch_size
        self._epochs: dict[int, NDArray[np.uint16]] = {}

    def batch(self, step: int) -> NDArray[np.int64]:
        """Step `step`'s (batch_size, sequence_length + 1): inputs lack the last column, targets the first."""
        rows = range(step * self._batch_size, (step + 1) * self._batch_size)
        places = [divmod(row, self._data.num_windows) for row in rows]
        for number in {epoch for epoch, _ in places} - self._epochs.keys():
            self._epochs[number] = self._data.epoch(number)
        for stale in self._epochs.keys() - {epoch for epoch, _ in places}:
            del self._epochs[stale]
        return np.stack([self._epochs[epoch][window] for epoch, window in places]).astype(np.int64)
