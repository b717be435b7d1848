"""Sources, splits and batches: every window once an epoch, and the same batch whoever asks."""

import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from model.training.bpe import train_bpe
from model.training.config import SourceConfig
from model.training.data import (
    Batches,
    CorpusError,
    TrainingData,
    encode_documents,
    read_source,
    remove_held_out,
)


def source_config(path: Path, repeats: int = 1, held_out: float = 0.0) -> SourceConfig:
    return SourceConfig(name=path.stem, path=path, repeats=repeats, held_out=held_out, licence="none")


def data(lengths: tuple[int, ...] = (5, 9, 30, 1), repeats: tuple[int, ...] = (1, 2, 1, 3)) -> TrainingData:
    starts = np.cumsum((0, *lengths))
    documents = [np.arange(s, s + n, dtype=np.uint16) for s, n in zip(starts, lengths, strict=False)]
    return TrainingData(documents=documents, repeats=list(repeats), sequence_length=4, seed=1)


def test_an_epoch_holds_every_document_as_often_as_it_repeats() -> None:
    training = data()
    assert training.num_tokens == 5 + 18 + 30 + 3
    for number in range(5):
        windows = training.epoch(number)
        assert windows.shape == ((56 - 1) // 4, 5)
        targets = windows[:, 1:].ravel().tolist()
        assert len(targets) == 52
        most = {token: 2 if 5 <= token < 14 else 3 if token == 44 else 1 for token in range(45)}
        assert all(targets.count(token) <= most[token] for token in set(targets))
    assert not np.array_equal(training.epoch(0), training.epoch(1))


def test_documents_are_not_torn_within_a_stream() -> None:
    windows = data().epoch(0)
    follows = {(int(a), int(b)) for row in windows for a, b in itertools.pairwise(row)}
    ends = {4, 13, 43, 44}
    assert all(b == a + 1 for a, b in follows if a not in ends)


def test_batches_do_not_depend_on_who_asks_in_which_order() -> None:
    forward, backward = Batches(data(), 3), Batches(data(), 3)
    wanted = [forward.batch(step) for step in range(20)]
    for step in reversed(range(20)):
        np.testing.assert_array_equal(backward.batch(step), wanted[step])
    first_epoch = np.concatenate(wanted)[:13]
    np.testing.assert_array_equal(np.sort(first_epoch, axis=0), np.sort(data().epoch(0), axis=0))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(CorpusError, match="4 training tokens: a single window needs 5"):
        data((4,), (1,))


def test_reads_text_and_json_lines_plain_and_compressed(tmp_path: Path) -> None:
    texts = [f"Story number {number}." for number in range(40)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "b.jsonl").write_text(lines)
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as file:
        file.write(lines)
    for name in ("a.txt", "b.jsonl", "c.jsonl.xz"):
        assert read_source(source_config(tmp_path / name)).train == texts


def test_held_out_documents_stay_held_out_when_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    texts = [f"Story number {number}." for number in range(400)]
    path.write_text("\n\n".join(texts[:300]))
    small = read_source(source_config(path, held_out=0.1))
    path.write_text("\n\n".join(texts))
    large = read_source(source_config(path, held_out=0.1))
    assert set(small.held_out) == set(large.held_out) & set(texts[:300])
    assert 0.05 < len(large.held_out) / 400 < 0.15
    assert not set(large.held_out) & set(large.train)
    assert small.sha256 != large.sha256


def test_nothing_held_out_anywhere_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("One fox.\n\nTwo foxes!\n\nThree foxes.")
    (tmp_path / "valid.txt").write_text("TWO foxes.")
    sources = remove_held_out(
        [read_source(source_config(tmp_path / "train.txt")), read_source(source_config(tmp_path / "valid.txt", 0, 1.0))]
    )
    assert [source.train for source in sources] == [["One fox.", "Three foxes."], []]
    assert sources[1].held_out == ["TWO foxes."]


def test_whole_books_are_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"Line {number} of a long book." * 10 for number in range(200)]
    (tmp_path / "book.jsonl").write_text(json.dumps({"text": "\n".join(lines)}))
    parts = read_source(source_config(tmp_path / "book.jsonl")).train
    assert len(parts) > 3
    assert "\n".join(parts).split("\n") == lines
    assert max(map(len, parts)) < 9000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", b" \n\n ", "no documents"),
        ("image.txt", b"\x89PNG\xff\xfe", "not UTF-8 text"),
        ("broken.jsonl", b'{"text": "a"}\n{"text"', "line 2: expected a JSON object"),
        ("other.jsonl", b'{"body": "a"}', "line 1: expected a JSON object"),
        ("null.jsonl", b'{"text": null}', "line 1: expected a JSON object"),
        ("cut.jsonl.xz", lzma.compress(b'{"text": "a"}' * 99)[:-20], "not UTF-8 text"),
        ("broken.jsonl.xz", b"nothing", "not UTF-8 text|Input format"),
    ],
)
def test_unusable_corpora_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read_source(source_config(tmp_path / name))
    assert name in str(caught.value)


def test_documents_end_with_the_end_of_text_mark() -> None:
    tokenizer = train_bpe(["a b"], 260)
    ids = encode_documents(tokenizer, ["a b", "b"])
    assert [array[-1] for array in ids] == [*tokenizer.eos_token_ids] * 2
    assert tokenizer.decode(ids[0][:-1].tolist()) == "a b"
