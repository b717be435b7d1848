"""User requests are derived from the texts that serve as responses."""

import random

import pytest

from model.training.data.encyclopedia_questions import answer_questions
from model.training.data.sentences import casually, clean_lines, is_unfit, sentences
from model.training.data.story_requests import MAX_CHARACTERS, MIN_CHARACTERS, tell_story

SEEDS = range(60)
MORE = " He ran to the park and played with a ball. The ball was big and red. His mom said it was time to go home." * 2


def requests(text: str, title: str | None = None) -> set[str]:
    """Return all first user messages, in lower case, without final punctuation."""
    told = [tell_story(text, title, random.Random(seed)) for seed in SEEDS]
    return {turns[0].lower().rstrip(".?!") for turns in told if turns is not None}


@pytest.mark.parametrize(
    ("opening", "subject"),
    [
        ("Once upon a time, there was a little dog named Max.", "a little dog named max"),
        ("Once, in a big forest, there lived a furry duck. It was happy.", "a furry duck"),
        ("One day, a tall, kind man went to the sea.", "a tall, kind man"),
        (
            "Lily and Ben like to play. Lily is small. Then Lily and Ben and Lily ate. She and Ben saw Ben.",
            "lily and ben",
        ),
        ("Sam saw the boy called Tom.", "a boy named tom"),
    ],
)
def test_a_story_is_asked_for_by_its_subject(opening: str, subject: str) -> None:
    asked = requests(opening + MORE)
    assert f"tell me a story about {subject}" in asked
    assert len(asked) > 20


def test_a_story_is_asked_for_by_title_words_and_beginning() -> None:
    asked = requests("Once upon a time, there was a cat." + MORE, "The Lazy Cat")
    assert any('"the lazy cat"' in text for text in asked)
    assert any("words" in text and "ball" in text for text in asked)
    assert any("once upon a time, there was a cat" in text for text in asked)
    assert any("lazy" not in text and "cat" not in text and "words" not in text for text in asked)


def test_a_story_that_goes_on_is_not_told_twice() -> None:
    text = "Once upon a time, there was a cat. It was very old." + MORE
    for seed in range(300):
        turns = tell_story(text, None, random.Random(seed))
        assert turns is not None
        asked, told = turns[:2]
        if told != text:
            head = text.removesuffix(told).strip()
            assert text.endswith(told)
            assert asked.lower().rstrip(".").endswith(head.lower().rstrip("."))
            break
    else:
        pytest.fail("no story goes on")


def test_talk_after_a_story_knows_the_story() -> None:
    text = "Once upon a time, there was a little dog named Max." + MORE
    talks = [turns for seed in range(400) if (turns := tell_story(text, None, random.Random(seed))) is not None]
    after = {(turns[2], turns[3]) for turns in talks if len(turns) > 2}
    assert ("What is the dog's name?", "The dog's name is Max.") in after
    assert ("Who is the story about?", "It is about a little dog named Max.") in after
    assert any("welcome" in answer for _, answer in after)


@pytest.mark.parametrize(
    "text",
    [
        "Too short.",
        "and began in the middle of it." + MORE,
        "Once there was a cat." + MORE * (MAX_CHARACTERS // len(MORE) + 1),
        "It never comes to an end, " * 20,
        "He was naked." + MORE,
    ],
)
def test_what_is_no_story_is_left_out(text: str) -> None:
    assert tell_story(text, None, random.Random(0)) is None


def test_a_story_ends_with_its_last_whole_line() -> None:
    turns = tell_story(f"There was a cat.{MORE}\nMoral of the story:", "T", random.Random(3))
    assert turns is not None
    assert turns[1].endswith("go home.")
    assert len(turns[1]) >= MIN_CHARACTERS


ARTICLES = {
    "Chamber pot": "A chamber pot is a container with a handle. People sat on a chamber pot at night.",
    "Shale": "Shale is a rock that is formed from mud. Much shale is black. It breaks into thin layers.",
    "Warsaw Pact": "The Warsaw Pact was an organization of Communist states. It was established in 1955.",
    "Pygmy marmoset": "Pygmy marmosets are the smallest monkeys of the world. They live in trees.",
    "Perugia": "Perugia is the capital city of Umbria in central Italy. It is near the Tiber River.",
    "Hal Needham": "Hal Brett Needham (March 6, 1931 - October 25, 2013) was an American stuntman and director. "
    "He directed a comedy.",
    "Ian McDiarmid": "Ian McDiarmid is a Scottish actor and director. He was born in Carnoustie.",
    "Jirga": "A jirga (Pashto / ) is a meeting of elders, () who decide. It is old. He was found at the age of. Lost.",
    "Mikhail Fokine": "Mikhail Fokine ( - 22 August 1942) was a Russian dancer. He was born in St. Petersburg.",
}


def asked_and_answered(title: str) -> dict[str, set[str]]:
    """Return first user messages with all the responses to each."""
    found: dict[str, set[str]] = {}
    for seed in range(150):
        turns = answer_questions(title, ARTICLES[title], random.Random(seed))
        assert turns is not None
        found.setdefault(turns[0], set()).add(turns[1])
    return found


@pytest.mark.parametrize(
    ("title", "question"),
    [
        ("Chamber pot", "What is a chamber pot?"),
        ("Shale", "What is shale?"),
        ("Warsaw Pact", "What was the Warsaw Pact?"),
        ("Pygmy marmoset", "What are pygmy marmosets?"),
        ("Perugia", "Where is Perugia?"),
        ("Perugia", "Tell me about Perugia."),
        ("Hal Needham", "Who was Hal Needham?"),
        ("Ian McDiarmid", "Who is Ian McDiarmid?"),
    ],
)
def test_questions_fit_what_is_asked_about(title: str, question: str) -> None:
    found = asked_and_answered(title)
    assert question in found
    first = sentences(ARTICLES[title])[0]
    assert all(answer.startswith(first) for answers in found.values() for answer in answers)


def test_holes_are_mended_or_left_out() -> None:
    assert {a for answers in asked_and_answered("Jirga").values() for a in answers} == {
        "A jirga is a meeting of elders, who decide.",
        "A jirga is a meeting of elders, who decide. It is old.",
    }
    for answers in asked_and_answered("Mikhail Fokine").values():
        assert all(
            answer.startswith("Mikhail Fokine (died 22 August 1942) was a Russian dancer.") for answer in answers
        )


@pytest.mark.parametrize(
    ("title", "text"),
    [
        ("Line", "The is a railroad line in Japan. It is long."),
        ("Reserve", "The reserve is 50 separate places covering. It is around the border."),
        ("Movies", 'The movies are: "Snatch", "Swept Away" and "".'),
        ("List of rivers", "This is a list of rivers. It is long."),
        ("Boiling", "It happens when a liquid becomes gas."),
        ("Manila", "Manila (Hangul: 馬尼拉) 馬 is a city. It is large."),
        ("Suicide", "Suicide is when somebody ends the own life."),
    ],
)
def test_articles_that_cannot_be_mended_are_left_out(title: str, text: str) -> None:
    assert answer_questions(title, text, random.Random(0)) is None


def test_more_is_what_the_article_says_next() -> None:
    talks = [answer_questions("Shale", ARTICLES["Shale"], random.Random(seed)) for seed in range(200)]
    longer = [turns for turns in talks if turns is not None and len(turns) == 4 and "more" in turns[2]]
    assert longer
    for turns in longer:
        assert f"{turns[1]} {turns[3]}" == ARTICLES["Shale"]


def test_sentences_end_where_they_end() -> None:
    text = 'Dr. J. G. Lee lived in the U.S. until 1990. "Is it?" She said so! It is 3.5 km.'
    assert sentences(text) == [
        "Dr. J. G. Lee lived in the U.S. until 1990.",
        '"Is it?"',
        "She said so!",
        "It is 3.5 km.",
    ]


def test_wrapped_lines_are_joined_and_paragraphs_kept() -> None:
    assert clean_lines("Goat and Dog\nwere great   friends.\n\nOne\nday\u00a0they went.") == (
        "Goat and Dog were great friends.\nOne day they went."
    )
    assert clean_lines("He said, “It’s me.”") == 'He said, "It\'s me."'


def test_careless_typing() -> None:
    assert casually("What is a dog?") == "what is a dog"
    assert casually("???") == "???"
    assert is_unfit("A naked man.")
    assert not is_unfit("The essex wife.")
