"""Minimal pairs: input validation, and scores as the sum of token logprobs."""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest

from model.config import ModelConfig
from model.evaluation.likelihood import Window, begin_of_text, score_windows
from model.evaluation.minimal_pairs import Pair, PairScore, accuracy, by_group, read_pairs, score_pairs, shipped_pairs
from model.io.files import OneLineError
from tests.model.configs import ROTARY, build
from tests.tiny_model import tiny_tokenizer

GOOD, BAD = "The dogs bark.", "The dogs barks."


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_pairs_are_read_in_the_format_of_blimp(tmp_path: Path) -> None:
    line = {"sentence_good": GOOD, "sentence_bad": BAD, "field": "morphology", "UID": "agreement_1", "pair_id": "0"}
    by_field = {"sentence_good": GOOD, "sentence_bad": BAD, "field": "syntax"}
    path = write(tmp_path / "pairs.jsonl", line, "", by_field, {"sentence_good": GOOD, "sentence_bad": BAD})
    pairs = read_pairs(path)
    assert [pair.group for pair in pairs] == ["agreement_1", "syntax", ""]
    assert pairs[0] == Pair(good=GOOD, bad=BAD, group="agreement_1")
    packed = tmp_path / "pairs.jsonl.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert read_pairs(packed) == pairs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no minimal pairs"),
        ("{", "line 1: expected a JSON object"),
        ('{"sentence_good": "a"}', "line 1: expected a JSON object"),
        ('{"sentence_good": "a", "sentence_bad": 3}', "line 1: expected a JSON object"),
        ('{"sentence_good": "a", "sentence_bad": "b", "UID": 3}', 'an optional text "UID"'),
        ("[" * 100_000, "line 1: expected a JSON object"),
        ('["a", "b"]', "line 1: expected a JSON object"),
        ('{"sentence_good": "a", "sentence_bad": "b"}\n{"sentence_good": "a", "sentence_bad": "a"}', "line 2: the two"),
        ('{"sentence_good": "a", "sentence_bad": ""}', "neither may be empty"),
    ],
)
def test_an_error_names_the_line_that_is_not_a_pair(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "pairs.jsonl", text)
    with pytest.raises(OneLineError) as caught:
        read_pairs(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shipped_pairs_differ_by_at_most_one_word_in_length() -> None:
    pairs = shipped_pairs()
    groups = Counter(pair.group for pair in pairs)
    assert len(groups) >= 20
    assert min(groups.values()) >= 6
    assert len({(pair.good, pair.bad) for pair in pairs}) == len(pairs)
    assert pairs == shipped_pairs()
    for pair in pairs:
        good, bad = pair.good.split(), pair.bad.split()
        assert good != bad
        assert abs(len(good) - len(bad)) <= 1
        assert not set("{}|[]") & set(pair.good + pair.bad)


def test_an_unreadable_file_of_pairs_gives_one_error_line(tmp_path: Path) -> None:
    with pytest.raises(OneLineError, match="No such file"):
        read_pairs(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "torn.jsonl.xz").write_bytes(lzma.compress(b"x" * 1000)[:50])
    for name in ("bytes.jsonl", "torn.jsonl.xz"):
        with pytest.raises(OneLineError, match="give a JSON Lines file in UTF-8"):
            read_pairs(tmp_path / name)


def test_a_sentence_scores_the_sum_of_its_tokens_after_the_bos_token() -> None:
    model, tokenizer = build(ModelConfig.from_dict(ROTARY)), tiny_tokenizer()
    pairs = [Pair(good=GOOD, bad=BAD, group="b"), Pair(good="a b", bad="the", group="a"), Pair(good=BAD, bad=GOOD)]
    scores = score_pairs(model, tokenizer, pairs)
    begin = begin_of_text(tokenizer)
    for pair, score in zip(pairs, scores, strict=True):
        alone = [score_windows(model, [Window([begin], tokenizer.encode(text))])[0] for text in (pair.good, pair.bad)]
        assert [score.good, score.bad] == pytest.approx([one.log_likelihood for one in alone])
        assert score.is_right == (score.good > score.bad)
    assert scores[0].is_right != scores[2].is_right
    assert accuracy(scores) == sum(score.is_right for score in scores) / 3
    assert list(by_group(scores)) == ["", "a", "b"]
    assert score_pairs(model, tokenizer, []) == []


def test_equal_scores_of_a_pair_count_as_wrong() -> None:
    assert not PairScore(pair=Pair(good="a", bad="b"), good=-1.0, bad=-1.0).is_right
