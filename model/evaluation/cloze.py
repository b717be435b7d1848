"""Cloze test: the right last word of a text among five.

The other four words end other texts of the same split, so that all five are likely last words. Chance is one fifth.
"""

import re
from collections.abc import Sequence
from random import Random

from model.evaluation.likelihood import Window, begin_of_text, score_windows
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer

NUM_CHOICES = 5
_LAST_WORD = re.compile(r"(?P<before>.*\w\W*)(?P<word> [a-z]+)(?P<after>\W*)", re.DOTALL)
_MOST_TOKENS = 512  # of a text before its last word; a longer text loses its beginning
_MOST_QUESTIONS = 200  # of a split, evenly spaced: each takes five passes over its text


def cloze_questions(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return a beginning and five endings for each text, of which the first is the text's own.

    A text whose last word has a capital is left out. So are all texts if they have fewer than five last words in all.
    Of many texts, up to `_MOST_QUESTIONS` evenly spaced texts are asked about.
    """
    found = [match for text in texts if (match := _LAST_WORD.fullmatch(text.rstrip()))]
    words = sorted({match["word"] for match in found})
    if len(words) < NUM_CHOICES:
        return []
    questions = []
    step = -(-len(found) // _MOST_QUESTIONS)
    for number, match in enumerate(found[::step]):
        others = Random(number).sample([word for word in words if word != match["word"]], NUM_CHOICES - 1)
        questions.append((match["before"], [word + match["after"] for word in (match["word"], *others)]))
    return questions


def cloze_accuracy(model: Transformer, tokenizer: Tokenizer, questions: Sequence[tuple[str, list[str]]]) -> float:
    """Return the share of questions whose correct ending, the first, has the highest log-likelihood per token.

    Requires at least one question.

    Raises:
        ValueError: the tokenizer cannot encode a text.
    """
    begin = begin_of_text(tokenizer)
    longest = min(_MOST_TOKENS, model.config.max_context_length // 2)
    windows = []
    for before, endings in questions:
        given = [begin, *tokenizer.encode(before)[-longest:]]
        windows += [Window(given, tokenizer.encode(ending)) for ending in endings]
    scores = [score.log_likelihood / score.num_tokens for score in score_windows(model, windows)]
    answers = [scores[start : start + NUM_CHOICES] for start in range(0, len(scores), NUM_CHOICES)]
    return sum(own > max(others) for own, *others in answers) / len(answers)
