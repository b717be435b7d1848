"""Accuracy on minimal pairs: a grammatical and an ungrammatical sentence that differ in one point of grammar.

A model is right on a pair if the grammatical sentence has the higher probability. Chance is one half. BLiMP (Warstadt
et al. 2020, arXiv 1912.00582) is the standard collection.
"""

import json
import lzma
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from model.evaluation.likelihood import Window, begin_of_text, score_windows
from model.io.files import OneLineError
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer

_GROUP_KEYS = ("UID", "field")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Minimal pair of sentences. group: the grammatical phenomenon; "" if the file of pairs does not name it."""

    good: str
    bad: str
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """Log-likelihood of each sentence of a minimal pair, in nats."""

    pair: Pair
    good: float
    bad: float

    @property
    def is_right(self) -> bool:
        return self.good > self.bad


def read_pairs(path: Path) -> list[Pair]:
    """Read minimal pairs from JSON Lines in BLiMP's format, plain or .xz; "UID" or "field" is the group of a pair.

    Raises:
        OneLineError: the file cannot be read, has no pairs, or has a line that is not a pair.
    """
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            pairs = [_read_pair(path, number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise OneLineError(f"{path}: {problem}; give a JSON Lines file in UTF-8, plain or .xz") from error
    if not pairs:
        raise OneLineError(f"{path}: has no minimal pairs; give a JSON Lines file with one pair a line")
    return pairs


def _read_pair(path: Path, number: int, line: str) -> Pair:
    try:
        values = json.loads(line)
        good, bad = values["sentence_good"], values["sentence_bad"]
        group = next((values[key] for key in _GROUP_KEYS if key in values), "")
        if not all(isinstance(value, str) for value in (good, bad, group)):
            raise TypeError("a sentence or the group is not a string")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OneLineError(
            f'{path}, line {number}: expected a JSON object with the texts "sentence_good" and "sentence_bad", and an '
            f'optional text "UID" or "field"'
        ) from error
    if not good or not bad or good == bad:
        raise OneLineError(
            f"{path}, line {number}: the two sentences of the pair must differ, and neither may be empty"
        )
    return Pair(good=good, bad=bad, group=group)


def shipped_pairs() -> list[Pair]:
    """Return the minimal pairs of `kvasir eval --suite shipped`, made from the templates of phenomena.toml.

    A phenomenon has `pairs_per_phenomenon` pairs, or fewer if its words have fewer combinations. The words are chosen
    by a generator with a fixed seed, so the pairs never change.
    """
    table = tomllib.loads(Path(__file__).with_name("phenomena.toml").read_text(encoding="utf-8"))
    words = {name: [_forms(word) for word in listed] for name, listed in table["words"].items()}
    pairs = []
    for phenomenon in table["phenomena"]:
        random = Random(phenomenon["name"])
        templates = phenomenon["good"], phenomenon["bad"]
        made: dict[tuple[str, str], None] = {}  # an ordered set
        for _ in range(20 * table["pairs_per_phenomenon"]):
            chosen = {name: random.choice(forms) for name, forms in words.items()}
            made[templates[0].format_map(chosen), templates[1].format_map(chosen)] = None
        chosen_pairs = list(made)[: table["pairs_per_phenomenon"]]
        pairs += [Pair(good=good, bad=bad, group=phenomenon["name"]) for good, bad in chosen_pairs]
    return pairs


def _forms(word: str) -> str | list[str]:
    return word.split("|") if "|" in word else word


def score_pairs(model: Transformer, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[PairScore]:
    """Score both sentences of each minimal pair: each after `begin_of_text`, without an EOS token at the end.

    The scores equal `loglikelihood` of lm-evaluation-harness with an empty context.

    Raises:
        ValueError: a sentence is longer than the model's context.
    """
    begin = begin_of_text(tokenizer)
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    scores = score_windows(model, [Window([begin], tokenizer.encode(sentence)) for sentence in sentences])
    totals = iter(score.log_likelihood for score in scores)
    return [PairScore(pair=pair, good=next(totals), bad=next(totals)) for pair in pairs]


def accuracy(scores: Sequence[PairScore]) -> float:
    """Return the share of minimal pairs, at least one, whose grammatical sentence has the higher probability."""
    return sum(score.is_right for score in scores) / len(scores)


def by_group(scores: Sequence[PairScore]) -> dict[str, list[PairScore]]:
    """Return the scores of minimal pairs by grammatical phenomenon, in alphabetical order."""
    groups: dict[str, list[PairScore]] = {}
    for score in scores:
        groups.setdefault(score.pair.group, []).append(score)
    return dict(sorted(groups.items()))
