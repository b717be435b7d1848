"""Corpora: reading, splitting, and no held-out text in training."""

import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import ModelConfig
from model.training.config import SourceConfig
from model.training.corpus import RUN_WORDS, Document, TextSource, Turn, leave_out_held_out, read_corpus, read_source
from model.training.data.batches import UNTRAINED
from tests.model.configs import ROTARY
from tests.model.training.test_train import config, dialogues

WORDS = [f"w{number}" for number in range(4)]


def source_config(path: Path, repeats: float = 1, held_out: float = 0.0, ids: tuple[str, ...] = ()) -> SourceConfig:
    return SourceConfig(name=path.stem, path=path, repeats=repeats, held_out=held_out, held_out_ids=ids, licence="none")


def texts_of(source: TextSource) -> list[str]:
    return [document.text for document in source.train]


def test_text_and_json_lines_are_read_plain_and_compressed(tmp_path: Path) -> None:
    texts = [f"Story number {number}." for number in range(40)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "b.jsonl").write_text(lines)
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as file:
        file.write(lines)
    for name in ("a.txt", "b.jsonl", "c.jsonl.xz"):
        assert texts_of(read_source(source_config(tmp_path / name))) == texts


def test_held_out_documents_stay_held_out_when_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    texts = [f"Story number {number}." for number in range(400)]
    path.write_text("\n\n".join(texts[:300]))
    small = read_source(source_config(path, held_out=0.1))
    path.write_text("\n\n".join(texts))
    large = read_source(source_config(path, held_out=0.1))
    assert set(small.held_out) == set(large.held_out) & set(texts[:300])
    assert 0.05 < len(large.held_out) / 400 < 0.15
    assert not set(large.held_out) & set(texts_of(large))
    assert small.sha256 != large.sha256


def test_a_text_held_out_of_one_source_is_left_out_of_all(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("One fox.\n\nTwo foxes!\n\nThree foxes.")
    (tmp_path / "valid.txt").write_text("TWO foxes.")
    sources = leave_out_held_out(
        [read_source(source_config(tmp_path / "train.txt")), read_source(source_config(tmp_path / "valid.txt", 0, 1.0))]
    )
    assert [texts_of(source) for source in sources] == [["One fox.", "Three foxes."], []]
    assert [source.left_out for source in sources] == [1, 0]
    assert sources[1].held_out == ["TWO foxes."]


def shares_a_run(text: str, others: list[str]) -> bool:
    """Return whether a text shares RUN_WORDS words in a row with one of `others`, by a naive search."""
    words = text.split()
    runs = {tuple(words[start : start + RUN_WORDS]) for start in range(len(words) - RUN_WORDS + 1)}
    for other in others:
        theirs = other.split()
        if words == theirs:
            return True
        if any(tuple(theirs[start : start + RUN_WORDS]) in runs for start in range(len(theirs) - RUN_WORDS + 1)):
            return True
    return False


@given(data=st.data())
def test_documents_that_share_a_run_of_words_with_a_held_out_text_are_left_out(data: st.DataObject) -> None:
    texts = st.lists(st.sampled_from(WORDS), max_size=3 * RUN_WORDS).map(" ".join)
    held_out = data.draw(st.lists(texts, min_size=1, max_size=3))
    train = data.draw(st.lists(texts, max_size=3))
    held = " ".join(held_out).split()
    for place in data.draw(st.lists(st.integers(0, max(0, len(held) - 1)), max_size=2)):
        length = data.draw(st.integers(RUN_WORDS - 2, RUN_WORDS + 2))
        train.append("before " + ", ".join(held[place : place + length]).upper() + " after")
    config = source_config(Path("a"))
    documents = [Document(text=text) for text in train]
    (source,) = leave_out_held_out([TextSource(config=config, sha256="", train=documents, held_out=held_out)])
    plain = {text: text.replace(",", "").lower() for text in train}
    assert texts_of(source) == [text for text in train if not shares_a_run(plain[text], held_out)]


def test_whole_books_are_held_out_by_their_id(tmp_path: Path) -> None:
    lines = [f"Line {number} of a book." * 20 for number in range(400)]
    books = [{"id": "a", "text": "\n".join(lines)}, {"id": "b", "text": "Another."}]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    source = read_source(source_config(tmp_path / "books.jsonl", ids=("a",)))
    assert "\n".join(source.held_out).split("\n") == lines
    assert texts_of(source) == ["Another."]
    with pytest.raises(ValueError, match="no document has the id 'c'"):
        read_source(source_config(tmp_path / "books.jsonl", ids=("a", "c")))


def test_all_parts_of_a_held_out_article_are_held_out(tmp_path: Path) -> None:
    articles = ["\n".join([f"Sentence {n} of article {article}." * 20] * 40) for article in range(60) for n in (1,)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in articles))
    source = read_source(source_config(tmp_path / "a.jsonl", held_out=0.3))
    assert 0 < len(source.held_out) < len(articles) * 3
    held_out = {text.split(".")[0] for text in source.held_out}
    assert not held_out & {text.split(".")[0] for text in texts_of(source)}


def test_a_dialogue_is_read_as_a_transcript(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "1", "turns": [["U", "Hi. "], ["S", "Hello!"]]}))
    (document,) = read_source(source_config(tmp_path / "d.jsonl")).train
    assert document.text == "User: Hi.\nAssistant: Hello!"
    assert document.turns == (Turn("user", "Hi."), Turn("assistant", "Hello!"))


def test_whole_books_are_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"Line {number} of a long book." * 10 for number in range(200)]
    (tmp_path / "book.jsonl").write_text(json.dumps({"text": "\n".join(lines)}))
    parts = texts_of(read_source(source_config(tmp_path / "book.jsonl")))
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
        ("turns.jsonl", b'{"turns": [["X", "a"]]}', "line 1: expected a JSON object"),
        ("words.jsonl", b'{"turns": [["U", [1]]]}', "line 1: expected a JSON object"),
        ("list.jsonl", b'{"turns": [["U", []]]}', "line 1: expected a JSON object"),
        ("null.jsonl", b'{"text": null}', "line 1: expected a JSON object"),
        ("cut.jsonl.xz", lzma.compress(b'{"text": "a"}' * 99)[:-20], "truncated or damaged xz file"),
        ("broken.jsonl.xz", b"nothing", "truncated or damaged xz file"),
    ],
)
def test_an_error_names_the_unusable_corpus(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_source(source_config(tmp_path / name))
    assert name in str(caught.value)


def test_a_source_as_text_has_transcripts_in_the_chat_phase(tmp_path: Path) -> None:
    source = dialogues(tmp_path)
    marked = {"vocab_size": 322, "model": ModelConfig.from_dict({**ROTARY, "vocab_size": 322}), "chat_steps": 30}
    phases = {}
    for name in ("messages", "as_text"):
        chosen = dataclasses.replace(source, as_text=name == "as_text")
        corpus = read_corpus(config(sources=(chosen,), **marked), tmp_path / name, lambda text: None)
        phases[name] = np.concatenate([corpus.chat.batch(number).targets_T.numpy() for number in range(3)])
    decoded = corpus.tokenizer.decode(phases["as_text"].tolist())
    assert "User: Tell me a fable.\nAssistant: " in decoded
    assert "<|im_start|>" not in decoded
    assert ((phases["messages"] == UNTRAINED).any(), (phases["as_text"] == UNTRAINED).any()) == (True, False)
