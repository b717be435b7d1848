"""distinct-n and repetition against their definitions, written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.evaluation.prompts import Diversity, distinct, measure_diversity, repetition, words

SAMPLE = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)


def test_words_are_lower_case_runs_of_letters_and_digits() -> None:
    assert words("Don't stop: it’s 3 o'clock, Été!") == ["don't", "stop", "it’s", "3", "o'clock", "été"]
    assert words(" …\n") == []


@given(samples=st.lists(SAMPLE, max_size=6), n=st.integers(1, 4))
def test_distinct_n_is_the_share_of_unique_n_grams(samples: list[list[str]], n: int) -> None:
    grams = []
    for sample in samples:
        for start in range(len(sample) - n + 1):
            grams.append(" ".join(sample[start : start + n]))
    assert distinct(samples, n) == (len(set(grams)) / len(grams) if grams else None)


@given(sample=SAMPLE, n=st.integers(1, 4))
def test_repetition_is_the_share_of_repeated_n_grams(sample: list[str], n: int) -> None:
    seen: list[list[str]] = []
    repeated = 0
    for start in range(len(sample) - n + 1):
        gram = sample[start : start + n]
        repeated += gram in seen
        seen.append(gram)
    assert repetition(sample, n) == (pytest.approx(repeated / len(seen)) if seen else None)


def test_diversity_of_several_samples() -> None:
    texts = ["The fox ran. The fox ran. The fox ran.", "A crow sang.", "the the the the the"]
    measured = measure_diversity(0.5, texts)
    # Unigrams: the fox ran a crow sang, of 17. Four-grams repeat in 3 of 6 and 1 of 2; the second text has none.
    assert measured == Diversity(
        temperature=0.5,
        num_samples=3,
        num_words=17,
        distinct=(6 / 17, 6 / 14, 5 / 11),
        repetition=pytest.approx((3 / 6 + 1 / 2) / 2),  # type: ignore[arg-type]
    )


def test_diversity_without_words_has_no_figures() -> None:
    measured = measure_diversity(1.0, ["", "!"])
    assert measured.distinct == (None, None, None)
    assert measured.repetition is None
