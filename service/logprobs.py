"""Log-probabilities in the shape of OpenAI's completions."""

from collections.abc import Sequence

from model.tokenizer.interface import Tokenizer
from model.tokenizer.stream import StreamDecoder
from service.messages import TokenLogprob
from service.responses import Logprobs

# JSON has no minus infinity; clients know this number for it.
_IMPOSSIBLE = -9999.0


class LogprobWriter:
    """Writes one choice's log-probabilities piece by piece, keeping count of the characters before each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._num_characters = 0

    def write(self, entries: Sequence[TokenLogprob]) -> Logprobs:
        """The next tokens' entries."""
        written = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            name = token_name(self._tokenizer, entry.token_id)
            logprob = None if entry.logprob is None else max(entry.logprob, _IMPOSSIBLE)
            written.tokens.append(name)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append(None if logprob is None else self._top(entry, name, logprob))
            written.text_offset.append(self._advance(entry.token_id))
        return written

    def end_prompt(self) -> None:
        """The prompt's text is over: an unfinished character in it stays so."""
        self._num_characters += len(self._decoder.flush())
        self._decoder = StreamDecoder(self._tokenizer)

    def _advance(self, token_id: int) -> int:
        """Count a token's characters; returns where it begins.

        A token of whole characters settles what was unfinished before it: that is its predecessors' text.
        """
        before = self._num_characters
        self._num_characters += len(self._decoder.push([token_id]))
        text = _whole_text(self._tokenizer, token_id)
        return before if text is None else self._num_characters - len(text)

    def _top(self, entry: TokenLogprob, name: str, logprob: float) -> dict[str, float]:
        """Alternatives by likelihood, and the token itself with the identical float."""
        top = {token_name(self._tokenizer, i): max(value, _IMPOSSIBLE) for i, value in entry.top}
        return top | {name: logprob}


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone: its text, a special token's name, or `bytes:\\xNN` where it is not whole characters."""
    text = _whole_text(tokenizer, token_id)
    if text is None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
    return text or tokenizer.token_name(token_id)


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text `echo` gives back for a prompt of ids: special tokens have none."""
    decoder = StreamDecoder(tokenizer)
    return decoder.push(token_ids) + decoder.flush()


def _whole_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """A token's text, none for a special one; None where it is not whole characters."""
    try:
        return tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return None
