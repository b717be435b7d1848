"""Log-probabilities in the shape of OpenAI's completions."""

from collections.abc import Sequence

from model.tokenizer import StreamDecoder, Tokenizer
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
            written.text_offset.append(self._num_characters)
            self._num_characters += len(self._decoder.push([entry.token_id]))
        return written

    def end_prompt(self) -> None:
        """The prompt's text is over: an unfinished character in it stays so."""
        self._num_characters += len(self._decoder.flush())
        self._decoder = StreamDecoder(self._tokenizer)

    def _top(self, entry: TokenLogprob, name: str, logprob: float) -> dict[str, float]:
        """Alternatives by likelihood, and the token itself with the identical float."""
        top = {token_name(self._tokenizer, i): max(value, _IMPOSSIBLE) for i, value in entry.top}
        return top | {name: logprob}


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone: its text, a special token's name, or `bytes:\\xNN` where it is not whole characters."""
    token = tokenizer.token_bytes(token_id)
    try:
        return token.decode() or tokenizer.token_name(token_id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text `echo` gives back for a prompt of ids: special tokens have none."""
    decoder = StreamDecoder(tokenizer)
    return decoder.push(token_ids) + decoder.flush()
