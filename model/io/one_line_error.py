"""Errors of one printable line, whatever characters the faulty file contains. Torch-free."""

HEAD_CHARACTERS, TAIL_CHARACTERS = 300, 180


class OneLineError(ValueError):
    """Base class of errors in users' files. The message is one line: the file, the fault, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(error_line(message))


def first_line(error: Exception) -> str:
    """Return the first line of an error's message: torch's messages have several lines, a MemoryError has none."""
    return next(iter(str(error).splitlines()), "out of memory" if isinstance(error, MemoryError) else repr(error))


def error_line(text: str) -> str:
    """Replace characters that cannot be printed, line breaks included, and shorten a long text in the middle.

    An error's fact is at the beginning and its remedy at the end, so both stay. Ordinary messages are unchanged.
    """
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]} … {text[-TAIL_CHARACTERS:]}"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
