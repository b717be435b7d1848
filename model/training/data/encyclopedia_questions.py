"""Questions and answers made from the first paragraph of encyclopedia articles.

The articles come from a wiki dump without templates. Removed templates leave gaps such as `( - 22 August 1942)`,
`covering.` and `, ""`. Some gaps are repaired. The answer ends before the first sentence with any other gap.
"""

import random
import re

from model.training.data.sentences import casually, clean_lines, is_unfit, sentences

MAX_ANSWER = 520  # characters
_MAX_TITLE = 60
_MAX_LEAD = 1500
_MAX_SENTENCES = 6  # three for each of two responses

_WHAT = (
    "What {is_} {it}?",
    "What {is_} {it}?",
    "What {is_} {it}?",
    "Can you tell me what {it} {is_}?",
    "Do you know what {it} {is_}?",
    "Please explain what {it} {is_}.",
    "I want to know what {it} {is_}.",
)
_WHO = (
    "Who {is_} {it}?",
    "Who {is_} {it}?",
    "Who {is_} {it}?",
    "Do you know who {it} {is_}?",
    "Can you tell me who {it} {is_}?",
)
_WHERE = ("Where {is_} {it}?", "Do you know where {it} {is_}?", "Can you tell me where {it} {is_}?")
_ABOUT = (
    "Tell me about {it}.",
    "Tell me about {it}.",
    "Tell me something about {it}.",
    "What do you know about {it}?",
    "What can you tell me about {it}?",
    "Can you tell me about {it}?",
    "Please tell me about {it}.",
    "I would like to learn about {it}.",
    "Write a few sentences about {it}.",
)
_EXPLAIN = (
    "Explain {it}.",
    "Describe {it}.",
)
_MORE = ("Tell me more.", "Can you tell me more?", "What else do you know about it?", "Tell me more, please.", "Go on.")
_MORE_PERSON = ("Tell me more.", "Can you tell me more?", "What else do you know?", "Tell me more, please.", "Go on.")
_THANKS = ("Thank you!", "Thanks!", "Thank you.", "Thanks, that helps.", "ok thanks")
_WELCOME = ("You're welcome!", "You're welcome! Do you have another question?", "I am glad to help!")

_DEFINES = re.compile(r"\b(is|are|was|were|means|refers to|lived)\b")
_PARENTHESES = re.compile(r"\s*\(([^()]*)\)")
_LIFE = re.compile(r"\((?:[^()]*\bborn\b|[^()]*\b\d{3,4}\s?[-–]\s?(?:[^()]*\b)?\d{3,4}\b)[^()]*\)|^[^.]*\bwas born\b")
_MAKES_A_PERSON = re.compile(
    r"\b(?:actor|actress|singer|songwriter|musician|politician|player|footballer|king|queen|emperor|empress|writer|"
    r"author|poet|novelist|painter|artist|scientist|physicist|chemist|mathematician|biologist|astronomer|philosopher|"
    r"president|minister|lawyer|judge|director|producer|rapper|composer|pianist|wrestler|boxer|swimmer|athlete|skier|"
    r"racer|driver|cyclist|runner|astronaut|explorer|general|admiral|officer|soldier|saint|pope|bishop|priest|monk|"
    r"theologian|historian|journalist|comedian|model|dancer|businessman|businesswoman|engineer|inventor|architect|"
    r"doctor|physician|economist|activist|leader|prince|princess|duke|monarch|ruler|coach|manager|criminal|murderer|"
    r"teacher|professor|sculptor|photographer|chef|designer|entertainer|presenter|host|governor|senator|statesman|"
    r"diplomat|goalkeeper|midfielder|defender|striker|umpire|jockey|guitarist|drummer|entrepreneur|spy|[a-z]+(?:ologist|inist|onist|nist|list|rist|tist|ician|grapher))\b"
)
_PLACE = re.compile(
    r"\b(?:is|was|are) (?:a|an|the|one of)\b[^.]{0,60}\b(?:city|town|village|country|islands?|river|lake|mountains?|"
    r"commune|municipality|suburb|district|province|county|capital|region|state|neighborhood|borough|airport|"
    r"bridge|park|sea|ocean|desert|university|castle|church|cathedral|building|stadium|museum|continent|peninsula|"
    r"valley|volcano|territory|republic|kingdom|place|settlement|area)\b[^.]* (?:in|of|on|near|between)\b"
)
# Traces of removed templates and markup.
_HOLES = re.compile(
    r'""|"\s*"|[\[\]{}|<>=*#_^\\]|\(\s|\s\)|\s[,.;:?!]|,[,.]|\.\.|;[.,]|:\.|\d{7,}|'
    r"\b(?:of|is|was|are|were|in|at|by|from|to|about|covers|covering|and|or|the|a|an|around|with|for|than|as|between|"
    r"called|over|has|had|its|their|near|through|under|until|since|into)[,.;:]|"
    r"\b(?:[Tt]he|[Aa]n?|[Oo]f) (?:is|are|was|were|has|had)\b|"
    r"\b(?:of|in|about|the|a|an|is|was|by|from) (?:and|or|of|is|was)\b|\bNil\b|\b(?:thumb|px|align|http)\b|' '|' or '"
)
_UNUSUAL = re.compile(r"[^\x20-\x7e\u00a0-\u024f\u2013\u2014\u20ac\u00a3\u00b0]")


def answer_questions(title: str, text: str, rng: random.Random) -> list[str] | None:
    """Return a question on the title, its answer, and sometimes a second exchange; None for an unsuitable article."""
    if title.startswith(("List of", "Lists of", "Timeline of", "Index of", "Geography of", "History of")):
        return None
    title = re.sub(r"\s*\([^)]*\)$", "", title).strip()
    lead = clean_lines(text.partition("\n")[0][:_MAX_LEAD])
    found = _clean_sentences(lead)
    if not found or not 1 < len(title) <= _MAX_TITLE or is_unfit(f"{title} {lead}"):
        return None
    first = found[0]
    verb = _DEFINES.search(_PARENTHESES.sub("", first))
    if verb is None or not _speaks_of(title, first) or _UNUSUAL.search(title):
        return None
    is_person = _is_person(title, first, lead)
    it = title if is_person else _as_spoken_of(title, text)
    is_ = verb.group(1) if verb.group(1) in ("is", "are", "was", "were") else "is"
    if is_ in ("are", "were") and not it.endswith("s") and f"{title}s".lower() in first.lower():
        it = f"{it}s"
    kinds: list[tuple[tuple[str, ...], float]] = [(_WHO if is_person else _WHAT, 0.55), (_ABOUT, 0.35)]
    if not is_person:
        kinds.append((_EXPLAIN, 0.06))
    if not is_person and _PLACE.search(first):
        kinds.append((_WHERE, 0.3))
    (kind,) = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
    answer = _first(found, rng.choice((2, 2, 3)) if kind in (_ABOUT, _EXPLAIN) else rng.choice((1, 1, 2)))
    asked = rng.choice(kind).format(it=it, is_=is_)
    turns = [asked if rng.random() < 0.85 else casually(asked), answer[0]]
    chance = rng.random()
    if chance < 0.12 and (rest := found[answer[1] :]):
        more, _ = _first(rest, 3)
        turns += [rng.choice(_MORE_PERSON if is_person else _MORE), more]
    elif chance > 0.96:
        turns += [rng.choice(_THANKS), rng.choice(_WELCOME)]
    return turns


def _is_person(title: str, first: str, lead: str) -> bool:
    """Guess whether an article is about a person.

    A person is "born", or has an occupation together with life dates or a following "He" or "She".
    """
    if "(born" in first:
        return True
    if " " not in title or _MAKES_A_PERSON.search(first) is None:
        return False
    begins = first.startswith(title.partition(" ")[0])
    return _LIFE.search(first) is not None or (begins and re.search(r"\. (?:He|She) ", lead) is not None)


def _first(found: list[str], number: int) -> tuple[str, int]:
    """Join 1 to `number` sentences within MAX_ANSWER characters. Also returns the number of sentences."""
    count = 1
    while count < min(number, len(found)) and sum(map(len, found[: count + 1])) + count <= MAX_ANSWER:
        count += 1
    return " ".join(found[:count]), count


def _clean_sentences(lead: str) -> list[str]:
    """Return the sentences before the first sentence with a gap."""
    lead = re.sub(r"\(\s*[-–]\s*(\d[^()]*|[A-Z][a-z]+ [^()]*)\)", r"(died \1)", lead)
    lead = _PARENTHESES.sub(lambda found: found.group() if _is_clean(found.group(1)) else "", lead)
    clean: list[str] = []
    for sentence in sentences(lead)[:_MAX_SENTENCES]:
        if (
            sentence[-1] not in ".!?"
            or len(sentence) < (8 if clean else 20)
            or not _is_clean(sentence)
            or sentence.count('"') % 2
        ):
            break
        if not (sentence[0].isupper() or sentence[0].isdigit() or sentence[0] == '"'):
            break
        if sentence.count("(") != sentence.count(")"):
            break
        clean.append(sentence)
    return clean if clean and len(clean[0]) <= MAX_ANSWER else []


def _is_clean(text: str) -> bool:
    """Return whether a text is not empty, lacks no word (such as "( )" or ", ,"), and has only Latin letters."""
    return (
        text.strip() != ""
        and re.search(r"^\s*[,;:/–-]|[,;:/]\s*$|: *[,;]|^or\b", text) is None
        and _HOLES.search(text) is None
        and _UNUSUAL.search(text) is None
    )


def _speaks_of(title: str, sentence: str) -> bool:
    """Return whether the defining sentence names the title, or its last word, near the start."""
    head = sentence[: max(80, len(title) + 40)].lower()
    return title.lower() in head or title.lower().split()[-1].rstrip("s") in head


def _as_spoken_of(title: str, text: str) -> str:
    """Return the title as used within a sentence: `a chamber pot`, `shale`, `the Warsaw Pact`."""
    begin = text[: len(title) + 8].strip('"')
    article = re.match(r"(An?|The) ", begin)
    common = _is_common(title, text)
    if article is not None and begin[article.end() :].lower().startswith(title.lower()):
        if article.group(1) != "The":
            common = not title[1:2].isupper()
        return f"{article.group(1).lower()} {_lowered(title) if common else title}"
    return _lowered(title) if common else title


def _is_common(title: str, text: str) -> bool:
    """Guess whether a title is a common noun rather than a name.

    A common noun occurs in lower case within a sentence. A title of several words without other capitals also counts,
    unless its first word occurs capitalised within a sentence.
    """
    if title[1:2].isupper() or not title[0].isupper() or re.search(r" [A-Z]", title):
        return False
    if _stands_within_a_sentence(_lowered(title), text):
        return True
    return " " in title and not _stands_within_a_sentence(title.partition(" ")[0], text)


def _stands_within_a_sentence(words: str, text: str) -> bool:
    """Return whether `words` occur within a sentence. `str.find` avoids compiling a pattern per article."""
    begin = text.find(f" {words}")
    while begin >= 0:
        end = begin + 1 + len(words)
        before = text[begin - 1 : begin]
        if (before == "," or before.islower()) and not text[end : end + 1].isalpha():
            return True
        begin = text.find(f" {words}", end)
    return False


def _lowered(title: str) -> str:
    return title[0].lower() + title[1:]
