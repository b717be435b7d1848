"""User requests for a story, derived from the story: its subject, its first sentence, its words."""

import random
import re
from collections import Counter

from model.training.data.sentences import casually, clean_lines, ends_whole, is_unfit, whole_sentences

MAX_CHARACTERS = 3600  # about 900 tokens: story and request must fit a context of 1,024 tokens
MIN_CHARACTERS = 150

# {it} is a subject, such as `a little dog named Max`.
_ABOUT = (
    "Tell me a story about {it}.",
    "Tell me a story about {it}.",
    "Please tell me a story about {it}.",
    "Can you tell me a story about {it}?",
    "Could you tell me a story about {it}?",
    "Could you tell me a short story about {it}, please?",
    "Tell me a short story about {it}.",
    "Write a story about {it}.",
    "Write a short story about {it}.",
    "Please write a short story about {it}.",
    "Write me a story about {it}.",
    "Can you write a story about {it}?",
    "I want to hear a story about {it}.",
    "I would like a story about {it}.",
    "I'd like to hear a story about {it}, please.",
    "Make up a story about {it}.",
    "Do you know a story about {it}?",
    "Tell me about {it} in a story.",
    "A story about {it}, please.",
    "A bedtime story about {it}, please!",
    "Tell me a bedtime story about {it}.",
    "My child wants to hear a story about {it}.",
    "Tell a story about {it}.",
    "Give me a story about {it}.",
    "Let's have a story about {it}.",
    "story about {it}",
)
_ANY = (
    "Tell me a story.",
    "Tell me a story!",
    "Can you tell me a story?",
    "Please tell me a story.",
    "Tell me a short story.",
    "Can you tell me a bedtime story?",
    "Tell me a bedtime story, please.",
    "I can't sleep. Can you tell me a story?",
    "Do you know a story?",
    "Do you know any stories?",
    "I am bored. Tell me a story.",
    "I would like to hear a story.",
    "Write a short story.",
    "Write a story for a small child.",
    "Make up a story for me.",
    "Tell me a children's story.",
    "Tell me a nice little story.",
    "Could you write a short story for my daughter?",
    "What story can you tell me?",
)
_TITLED = (
    'Tell me the story "{it}".',
    'Write a story called "{it}".',
    'Write a short story with the title "{it}".',
    'Do you know the story "{it}"?',
    'Can you tell me a story called "{it}"?',
    'I want to hear "{it}".',
    'Please tell me the story "{it}".',
)
_BEGINS = (
    "Write a short story that begins with: {it}",
    "Tell me a story that begins like this: {it}",
    "Write a story that starts with: {it}",
    "Please write a story. It should begin with: {it}",
    'Write a story with this first sentence: "{it}"',
    'Tell me a story that starts with "{it}"',
)
_GOES_ON = (
    "Continue this story: {it}",
    "Go on with this story: {it}",
    "What happens next? {it}",
    "Please finish this story: {it}",
    "Finish the story: {it}",
    "How does this story go on? {it}",
)
_WITH_WORDS = (
    "Tell me a story with the words {it}.",
    "Write a short story with the words {it}.",
    "Write a story that uses the words {it}.",
    "Can you tell me a story with the words {it}?",
    "Tell me a story with {it} in it.",
    "Write a short story. Use the words {it}.",
    "Make a story out of these words: {it}.",
)
_MORAL = ("Tell me a story with a moral.", "Write a short story that has a moral.", "Tell me a story I can learn from.")
_THANKS = (
    "Thank you!",
    "Thanks!",
    "Thank you, that was nice.",
    "I like this story.",
    "That was a nice story!",
    "thanks",
)
_WELCOME = (
    "You're welcome! I am glad that you like it.",
    "You're welcome! Would you like another one?",
    "You're welcome! I like telling stories.",
    "I am happy that you liked it!",
)
_WHO = ("Who is the story about?", "Who was this story about?", "Who is in the story?", "who is it about?")

_NAMED = re.compile(
    r"\b((?:an?|the) (?:[a-z-]+,? (?:and )?){0,3}?([a-z-]+)) (?:named|called|whose name was) ([A-Z][a-z]+)\b"
)
_THERE = re.compile(
    r"\b[Tt]here (?:once )?(?:was|lived|were|is) ((?:a|an|two|three|some) (?:[a-z-]+,? (?:and )?){0,3}?[a-z-]+)"
    r"(?=[.,!?]| (?:who|that|named|called|in|and|with|on|at|near|living|walking|playing|named)\b)"
)
_OPENING = re.compile(
    r"^(?:One day, |One (?:[a-z]+ )?(?:morning|day), )?((?:a|an) (?:[a-z-]+,? (?:and )?){0,3}?[a-z-]+)"
    r"(?= (?:was|went|saw|lived|wanted|found|had|who|and|came|walked|liked|loved)\b)",
    re.IGNORECASE,
)
_NOUN = re.compile(
    r"\b(?:a|an|the|his|her|their|my|your)(?: [a-z]+){0,2}? ([a-z]{3,})"
    r"(?=[.,!?]| (?:and|was|is|were|in|on|at|to|with|that|who|had|from|said|of|for|but|so)\b)"
)
_THING = re.compile(r"\b(an? (?:[a-z]+ )?[a-z]{3,})(?=[.,!?]| (?:and|was|in|on|at|to|with|that|from|of|for|but)\b)")
_CAPITALISED = re.compile(r"(?<![.!?] )(?<![.!?]\" )(?<!^)(?<!\n)(?<!\")\b([A-Z][a-z]{2,})\b")
# Capitalised words that are not names.
_NO_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        Mom Mommy Mum Mummy Mama Dad Daddy Papa Once One The Then But And She They Day Suddenly When After Grandma
        Grandpa Mr Mrs Miss Finally This That There What Yes Can You Are How Let Please Thank Wow Christmas Hello Look
        Moral God Come Why Don Where Who Maybe Sure Will Monday Tuesday Wednesday Thursday Friday Saturday Sunday Not
        Now Oh Okay Mother Father Sir Grandmother Grandfather Uncle Aunt Teacher Doctor Let His Her Their Its Here Hey
        Halloween Easter English
        """,
    )
)
# Words matched by the noun pattern that make no useful request.
_NO_NOUNS = frozenset(
    re.findall(
        r"\w+",
        """
        day time way other others one end moral story lot side left right top back same very next first rest all thing
        things front middle kind most best morning afternoon evening night bit while moment whole little big old own
        new too much more something idea there here her him them she they that this what who was were had said and but
        mommy mom mummy mum daddy dad friends fun around again away not his hers its then
        """,
    )
)


def tell_story(text: str, title: str | None, rng: random.Random) -> list[str] | None:
    """Return a request, the story, and sometimes a short exchange after it; None for an unsuitable text."""
    story = _clean(text)
    if story is None:
        return None
    subject = _subject(story)
    asked, response = _request(story, title, subject, rng)
    turns = [asked if rng.random() < 0.85 else casually(asked), response]
    chance = rng.random()
    if chance < 0.06:
        turns += [rng.choice(_THANKS), rng.choice(_WELCOME)]
    elif chance < 0.12 and subject is not None:
        turns += [rng.choice(_WHO), f"It is about {subject}."]
    elif chance < 0.18 and (named := _NAMED.search(story)) is not None:
        kind, name = named.group(2), named.group(3)
        turns += [f"What is the {kind}'s name?", rng.choice([f"The {kind}'s name is {name}.", f"{name}."])]
    return turns


def _request(story: str, title: str | None, subject: str | None, rng: random.Random) -> tuple[str, str]:
    """Return the user's request and the assistant's response: the story, or its continuation."""
    first, _, rest = whole_sentences(story)
    nouns = [word for word, _ in Counter(_NOUN.findall(story)).most_common(8) if word not in _NO_NOUNS]
    ways: list[tuple[float, str]] = [(0.12, "any")]
    if title:
        ways.append((0.6, "title"))
    if subject is not None:
        ways.append((0.6, "about"))
    if len(nouns) >= 3:
        ways.append((0.12, "words"))
    if len(first) < 200:
        ways.append((0.08, "begins"))
    if len(rest) >= MIN_CHARACTERS and len(story) - len(rest) < 400:
        ways.append((0.1, "goes on"))
    if "moral of the story" in story:
        ways.append((0.04, "moral"))
    match rng.choices([way for _, way in ways], [weight for weight, _ in ways])[0]:
        case "title":
            return rng.choice(_TITLED).format(it=title), story
        case "about" if subject is not None:
            return rng.choice(_ABOUT).format(it=_less_or_more(subject, story, rng)), story
        case "words":
            few = rng.sample(nouns[:6], 3 if len(nouns) < 4 or rng.random() < 0.7 else 2)
            rng.shuffle(few)
            return rng.choice(_WITH_WORDS).format(it=f"{', '.join(few[:-1])} and {few[-1]}"), story
        case "begins":
            return rng.choice(_BEGINS).format(it=first), story
        case "goes on":
            return rng.choice(_GOES_ON).format(it=story[: len(story) - len(rest)].strip()), rest
        case "moral":
            return rng.choice(_MORAL), story
    return rng.choice(_ANY), story


def _subject(story: str) -> str | None:
    """Return the subject of a story, such as `a little dog named Max` or `Lily and Ben`; None if no rule matches."""
    opening = story[:300]
    if (named := _NAMED.search(opening)) is not None:
        article = named.group(1)
        article = f"a{article[3:]}" if article.startswith("the ") else article
        return f"{article} named {named.group(3)}"
    if (there := _THERE.search(opening)) is not None:
        return there.group(1)
    known = set(_CAPITALISED.findall(story)) - _NO_NAMES  # within a sentence at least once
    counts = Counter(word for word in re.findall(r"\b[A-Z][a-z]+", story) if word in known)
    names = [name for name, count in counts.most_common(2) if count >= 3 and name in opening]
    if names:
        return " and ".join(sorted(names, key=story.index))
    if (begun := _OPENING.search(opening)) is not None:
        return begun.group(1)[0].lower() + begun.group(1)[1:]
    return None


def _less_or_more(subject: str, story: str, rng: random.Random) -> str:
    """Vary the subject: unchanged, without its name, without its adjectives, or with an object of the story."""
    chance = rng.random()
    if chance < 0.15:
        return subject.partition(" named ")[0]
    if chance < 0.3 and (found := re.fullmatch(r"(an?) (?:[a-z-]+,? (?:and )?)+([a-z-]+)( named .*)?", subject)):
        noun = found.group(2)
        return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}{found.group(3) or ''}"
    if chance < 0.45:
        known = {*subject.split(), *_NO_NOUNS}
        things = [thing for thing in _THING.findall(story) if known.isdisjoint(thing.split()[1:])]
        if things:
            return f"{subject} and {rng.choice(things)}"
    return subject


def _clean(text: str) -> str | None:
    """Return the story in whole sentences, one paragraph per line; None if it is unfit, too short or too long."""
    story = clean_lines(text)
    if len(story) > MAX_CHARACTERS:
        return None
    lines = story.split("\n")
    while lines and not ends_whole(lines[-1]):
        lines.pop()
    story = "\n".join(lines)
    if len(story) < MIN_CHARACTERS or not story[0].isupper() or is_unfit(story):
        return None
    return story
