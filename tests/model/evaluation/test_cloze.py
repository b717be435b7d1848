"""The last word of a text among five."""

from model.config import ModelConfig
from model.evaluation.cloze import NUM_CHOICES, cloze_accuracy, cloze_questions
from model.evaluation.likelihood import Window, begin_of_text, score_windows
from tests.model.configs import ROTARY, build
from tests.tiny_model import tiny_tokenizer

TEXTS = [
    "The cat sat. It was happy.",
    "A dog ran home!",
    "We saw the sea",
    "She had a red hat.",
    'He said, "it is cold."',
]


def test_each_text_is_asked_for_its_own_last_word_among_those_of_others() -> None:
    questions = cloze_questions([*TEXTS, "It was Tom.", "word", ""])
    assert [before for before, _ in questions] == [
        "The cat sat. It was", "A dog ran", "We saw the", "She had a red", 'He said, "it is'
    ]  # fmt: skip
    assert questions[0][1][0] == " happy."
    assert questions[1][1][0] == " home!"
    for _, endings in questions:
        assert len(set(endings)) == NUM_CHOICES
    assert cloze_questions(TEXTS[:4]) == []


def test_of_many_texts_evenly_spaced_ones_are_asked_about() -> None:
    texts = [f"Text {number} ends with {word}." for number in range(150) for word in ("a", "b", "c", "d", "e")]
    befores = [before for before, _ in cloze_questions(texts)]
    assert befores == [text.rpartition(" ")[0] for text in texts[::4]]
    assert len(befores) <= 200


def test_the_ending_with_the_highest_likelihood_per_token_is_the_answer() -> None:
    model, tokenizer = build(ModelConfig.from_dict(ROTARY)), tiny_tokenizer()
    questions = cloze_questions(TEXTS)
    num_right = 0
    for before, endings in questions:
        given = [begin_of_text(tokenizer), *tokenizer.encode(before)]
        scores = score_windows(model, [Window(given, tokenizer.encode(ending)) for ending in endings])
        means = [score.log_likelihood / score.num_tokens for score in scores]
        num_right += means.index(max(means)) == 0
    assert cloze_accuracy(model, tokenizer, questions) == num_right / len(questions)
