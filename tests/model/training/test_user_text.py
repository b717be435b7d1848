"""The user's text files: reading, cutting, and error messages."""

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest

from model.training import user_text
from model.training.user_text import LEAST_BYTES, hold_out, read_own_text

SENTENCES = [f"The fox and her {number} children went home by way {number * 7}." for number in range(2000)]
RUNNING = " ".join(SENTENCES)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def squeezed(text: str) -> str:
    return "".join(text.split())


def test_running_text_without_line_breaks_is_cut_at_sentences_without_loss(tmp_path: Path) -> None:
    text = read_own_text([written(tmp_path / "a.txt", RUNNING)])
    assert squeezed("".join(text.documents)) == squeezed(RUNNING)
    assert len(text.documents) >= 20
    assert all(document.rstrip().endswith(".") for document in text.documents)
    assert max(map(len, text.documents)) <= user_text.PART_CHARACTERS * 1.5
    assert text.form.startswith("running text, cut at sentences into")


@pytest.mark.parametrize(
    ("unit", "end"),
    [("a line without a stop ", "\n"), ("кот и пёс ", " "), ("猫と犬は家に帰りました", "。"), ("x", "")],
)
def test_text_of_any_script_is_cut(tmp_path: Path, unit: str, end: str) -> None:
    content = "".join(f"{unit}{number}{end}" for number in range(8000))
    text = read_own_text([written(tmp_path / "a.txt", content)])
    assert squeezed("".join(text.documents)) == squeezed(content)
    assert len(text.documents) >= 15


def test_short_paragraphs_are_not_separate_documents(tmp_path: Path) -> None:
    paragraphs = "\n\n".join(" ".join(SENTENCES[start : start + 5]) for start in range(0, 2000, 5))
    text = read_own_text([written(tmp_path / "a.txt", paragraphs)])
    assert len(text.documents) < 40
    assert all("\n\n" in document for document in text.documents)


def test_long_pieces_between_blank_lines_are_documents(tmp_path: Path) -> None:
    pieces = [" ".join(SENTENCES[start : start + 40]) for start in range(0, 2000, 40)]
    text = read_own_text([written(tmp_path / "a.txt", "\n\n".join(pieces))])
    assert text.documents == pieces
    assert text.form == "50 documents"


def test_end_of_text_tokens_and_json_lines_separate_documents(tmp_path: Path) -> None:
    stories = SENTENCES[:1000]
    marked = written(tmp_path / "a.txt", "\n<|endoftext|>\n".join(stories))
    listed = written(tmp_path / "b.jsonl", "\n" + lines(stories))
    assert read_own_text([marked]).documents == stories
    assert read_own_text([listed]).documents == stories


def test_compressed_files_and_directories_are_read(tmp_path: Path) -> None:
    plain = read_own_text([written(tmp_path / "a.txt", RUNNING)])
    (tmp_path / "all" / "deep").mkdir(parents=True)
    written(tmp_path / "all" / "deep" / "a.txt.xz", lzma.compress(RUNNING.encode()))
    written(tmp_path / "all" / "picture.png", b"\x89PNG")
    written(tmp_path / "all" / ".hidden.txt", "hidden")
    packed = read_own_text([tmp_path / "all"])
    assert packed.documents == plain.documents


def test_several_files_are_joined_and_duplicates_removed(tmp_path: Path) -> None:
    first = written(tmp_path / "a.txt", RUNNING[: len(RUNNING) // 2])
    second = written(tmp_path / "b.txt", RUNNING[len(RUNNING) // 2 :])
    both = read_own_text([first, second])
    assert set(both.digests) == {str(first), str(second)}
    again = read_own_text([written(tmp_path / "c.jsonl", lines(SENTENCES * 2))])
    assert again.documents == SENTENCES


def test_crlf_line_ends_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    ours = read_own_text([written(tmp_path / "a.txt", "\n".join(SENTENCES))])
    theirs = read_own_text([written(tmp_path / "b.txt", b"\xef\xbb\xbf" + "\r\n".join(SENTENCES).encode())])
    assert theirs.documents == ours.documents


def test_a_lone_surrogate_in_json_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "\\ud800 lonely"}\n' + lines(SENTENCES))
    assert read_own_text([path]).documents[0] == "? lonely"


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", "{path}: 0 bytes of text; at least 20 KB are needed"),
    "white": ("a.txt", b" \n\t" * 9000, "{path}: 1 bytes of text; at least 20 KB are needed"),
    "small": ("a.txt", RUNNING[:3000].encode(), "{path}: 3.0 KB of text; at least 20 KB are needed"),
    "repeated": ("a.txt", b"The fox ran.\n" * 10_000, "of text remain after removing duplicates from 130 KB"),
    "picture": ("a.txt", b"\x89PNG\r\n\x1a\n", "{path}: not UTF-8 text: 'utf-8' codec can't decode byte 0x89"),
    "document": ("a.txt", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "{path}: not UTF-8 text: "),
    "gzip": ("a.txt", gzip.compress(b"x"), "{path}: not UTF-8 text: "),
    "cut off": ("a.txt.xz", lzma.compress(RUNNING.encode())[:-20], "{path}: truncated or damaged xz file"),
    "damaged": ("a.txt.xz", lzma.compress(b"x" * 999)[:20] + b"no", "{path}: truncated or damaged xz file"),
    "zero": ("a.txt", b"abc\0", "{path}: not UTF-8 text: it has zero bytes; give plain text"),
    "utf-16": ("a.txt", RUNNING.encode("utf-16"), "convert the text, for example with: iconv"),
    "latin": ("a.txt", b"caf\xe9", "0xe9 in position 0: unexpected end of data; give plain text"),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text": "b\n', "{path}, line 2: expected a JSON object with a"),
    "key": ("a.jsonl", b'{"content": "a"}\n', "{path}, line 1: expected a JSON object with a"),
    "number": ("a.jsonl", b'{"text": 1}\n', "{path}, line 1: expected a JSON object with a"),
    "list": ("a.jsonl", b'["a"]\n', "{path}, line 1: expected a JSON object with a"),
    "nested": ("a.jsonl", b"[" * 100_000, "{path}, line 1: expected a JSON object with a"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_unusable_files_are_rejected_with_a_one_line_error(tmp_path: Path, what: str) -> None:
    name, content, message = REFUSED[what]
    path = written(tmp_path / name, content)
    with pytest.raises(ValueError, match=re.escape(message.format(path=path))) as caught:
        read_own_text([path])
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_without_text_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nope\.txt: No such file or directory"):
        read_own_text([tmp_path / "nope.txt"])
    with pytest.raises(ValueError, match="a directory without text files"):
        read_own_text([tmp_path])


def test_text_over_the_limit_of_characters_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_text, "MOST_CHARACTERS", 100_000)
    path = written(tmp_path / "a.txt", RUNNING)
    packed = written(tmp_path / "a.txt.xz", lzma.compress(RUNNING.encode()))
    for given in ([path], [packed]):
        with pytest.raises(ValueError, match="give a part of the text"):
            read_own_text(given)


def test_a_few_documents_are_held_out_whatever_their_number(tmp_path: Path) -> None:
    for count in (500, 1200, 2000):
        documents = read_own_text([written(tmp_path / "a.txt", " ".join(SENTENCES[:count]))]).documents
        kept, held_out = hold_out(documents)
        assert len(held_out) >= 2
        assert sorted(kept + held_out) == sorted(documents)
        assert 0.03 < sum(map(len, held_out)) / sum(map(len, documents)) < 0.25
    assert hold_out(list(reversed(documents)))[1] == list(reversed(held_out))


def test_at_most_130000_characters_of_a_large_text_are_held_out() -> None:
    documents = [f"{number} " + "word " * 10 + str(number * 13) for number in range(60_000)]
    assert sum(map(len, hold_out(documents)[1])) < 130_000


def test_nothing_is_held_out_of_texts_that_all_quote_each_other() -> None:
    same = " ".join(f"word{number}" for number in range(30))
    documents = [f"{number} {same}" for number in range(100)]
    assert hold_out(documents) == (documents, [])


def test_text_of_the_minimum_size_is_accepted(tmp_path: Path) -> None:
    size = len(SENTENCES[0])
    enough = RUNNING[: LEAST_BYTES + size]
    assert user_text.num_bytes(read_own_text([written(tmp_path / "a.txt", enough)]).documents) >= LEAST_BYTES


def test_files_below_apart_directories_are_not_read(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", RUNNING)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    written(tmp_path / "runs" / "mine" / "clock.json", "3.5")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "mine", target_is_directory=True)
    text = read_own_text([tmp_path], apart=[tmp_path / "runs" / "mine", tmp_path / "none"])
    assert list(text.digests) == [str(tmp_path / "a.txt")]
