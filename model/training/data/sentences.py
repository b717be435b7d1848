"""Rules for splitting English text into lines and sentences."""

import re

# End of a sentence, followed by the start of the next. Initials, titles and other abbreviations do not end a sentence.
_END = re.compile(r"(?<=[.!?])[\"')]?\s+(?=[\"'(]?[A-Z0-9])")
_ABBREVIATED = re.compile(
    r"\b(?:[A-Z]|Dr|Mr|Mrs|Ms|St|Jr|Sr|Prof|Rev|Gen|Col|Capt|Lt|Sgt|Gov|Sen|Rep|Hon|vs|etc|approx|ca|c|b|d|r|fl|No|"
    r"pp|Mt|Ft|Inc|Ltd|Co|Corp|Bros|e\.g|i\.e|U\.S|U\.K|a\.m|p\.m|B\.C|A\.D|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Sept|"
    r"Oct|Nov|Dec|lit|Lat|Gr|sq|km|mi|al|cf|vol|eds)\.$"
)
_WORD = re.compile(r"[a-z]+")
# Unfit for a children's story or a response to a child.
_UNFIT = frozenset(
    _WORD.findall(
        """
        sex sexual sexually sexuality porn porno pornographic pornography erotic rape raped rapes rapist rapists nude
        naked penis vagina vaginal masturbate masturbation orgasm orgasms prostitute prostitutes prostitution suicide
        suicidal fuck fucked fucking shit shitty jizz genital genitals pedophile pedophilia incest torture tortured
        torturing behead beheaded beheading genocide nigger niggers molested molesting
        """
    )
)
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " "})


def sentences(text: str) -> list[str]:
    """Split one line of text into sentences."""
    parts: list[str] = []
    begin = 0
    for end in _END.finditer(text):
        if _ABBREVIATED.search(text[begin : end.start()]) is None:
            parts.append(text[begin : end.end()].strip())
            begin = end.end()
    return [part for part in (*parts, text[begin:].strip()) if part]


def whole_sentences(text: str) -> tuple[str, str, str]:
    """Return the first sentence, the first one to three sentences, and the rest of the text."""
    line, _, _ = text.partition("\n")
    found = sentences(line)
    head = " ".join(found[: min(3, max(1, len(found) - 1))])
    return found[0], head, text[len(head) :].strip() if text.startswith(head) else ""


def ends_whole(line: str) -> bool:
    """Return whether a line ends with sentence punctuation."""
    return re.search(r"[.!?][\"')]*$", line) is not None


def clean_lines(text: str) -> str:
    """Put each paragraph on one line, with single spaces and plain quotes.

    A line that ends in the middle of a sentence is joined with the next line.
    """
    lines = [" ".join(line.split()) for line in text.translate(_QUOTES).splitlines()]
    joined = ""
    for line in filter(None, lines):
        wrapped = re.search(r"[^.!?:\"')-]$", joined) is not None
        joined += (" " if wrapped else "\n" if joined else "") + line
    return joined


def casually(asked: str) -> str:
    """Imitate hurried typing: no capital at the start, no full stop."""
    return asked[0].lower() + (asked[1:].rstrip(".!?") or asked[1:])


def is_unfit(text: str) -> bool:
    """Return whether a text has words that are unfit for children."""
    return not _UNFIT.isdisjoint(_WORD.findall(text.lower()))
