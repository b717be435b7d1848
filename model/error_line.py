"""What an error says, as one line a person can read, whatever stood in the file it speaks of. Torch-free."""

HEAD_CHARACTERS, TAIL_CHARACTERS = 300, 180


def error_line(text: str) -> str:
    """The text without line breaks and other characters that cannot be shown; a long one loses its middle.

    What is wrong stands at the beginning, what to do at the end. Ordinary messages come back as they are.
    """
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]} … {text[-TAIL_CHARACTERS:]}"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
