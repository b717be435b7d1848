"""Logprobs in the formats of OpenAI's completions, OpenAI's chat completions, and vLLM's prompt logprobs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.tokenizer.interface import StreamDecoder, Tokenizer
from service.ipc.messages import TokenLogprob
from service.protocol import responses

# JSON has no minus infinity. This is the value that OpenAI's API uses instead.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobFormat:
    """Format of logprobs: the number of most likely tokens per position, `num_top`, and the names of tokens.

    names_are_ids: name each token "token_id:N", instead of by its text.
    visible_token_ids: special tokens that add their name to the completion's text.
    """

    tokenizer: Tokenizer
    num_top: int
    names_are_ids: bool = False
    visible_token_ids: frozenset[int] = frozenset()

    def name(self, token_id: int) -> str:
        """Return the string that stands for a token in logprobs: its text, or "token_id:N"."""
        return f"token_id:{token_id}" if self.names_are_ids else format_token_name(self.tokenizer, token_id)

    def added_bytes(self, token_id: int) -> list[int] | None:
        """Return the bytes that a token adds to the completion's text; None for a token that adds nothing."""
        name = self.tokenizer.format_token_name(token_id).encode() if token_id in self.visible_token_ids else b""
        return list(self.tokenizer.token_bytes(token_id) or name) or None

    def top(self, entry: TokenLogprob) -> Iterator[tuple[int, float]]:
        """Return the ids and logprobs (-9999 at the lowest) of the `num_top` most likely tokens at a position."""
        return ((token_id, max(value, _IMPOSSIBLE)) for token_id, value in entry.top[: self.num_top])


class LogprobWriter:
    """Writer of one completion's logprobs in the format of `/v1/completions`, some tokens at a time, in order."""

    def __init__(self, format: LogprobFormat) -> None:
        self._format = format
        self._num_characters = 0
        self._visible_token_ids = format.visible_token_ids
        self._decoder = StreamDecoder(format.tokenizer, format.visible_token_ids)

    def write(
        self, entries: Sequence[TokenLogprob], *, prompt: Sequence[TokenLogprob] = (), num_hidden: int = 0
    ) -> responses.Logprobs:
        """Return the logprobs of the tokens in `prompt`, followed by those of the completion's next tokens.

        An incomplete character at the end of the prompt stays incomplete, whatever the completion begins with.
        `num_hidden`: number of tokens at the start of `prompt` whose special tokens have no text, see `prompt_text`.
        """
        written = responses.Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if prompt:
            self._begin(frozenset())
            self._append(written, prompt[:num_hidden])
            self._begin(frozenset(self._format.tokenizer.special_tokens.values()))
            self._append(written, prompt[num_hidden:])
            self._begin(self._format.visible_token_ids)
        self._append(written, entries)
        return written

    def _begin(self, visible_token_ids: frozenset[int]) -> None:
        """Begin the text after this point anew: an incomplete character before it stays incomplete.

        From here on, the special tokens `visible_token_ids` add their names to the text.
        """
        self._num_characters += len(self._decoder.flush())
        self._visible_token_ids = visible_token_ids
        self._decoder = StreamDecoder(self._format.tokenizer, visible_token_ids)

    def _append(self, written: responses.Logprobs, entries: Sequence[TokenLogprob]) -> None:
        for entry in entries:
            name, logprob, top = self._format.name(entry.token_id), None, None
            if entry.logprob is not None:
                logprob = max(entry.logprob, _IMPOSSIBLE)
                top = {self._format.name(token_id): value for token_id, value in self._format.top(entry)}
                top[name] = logprob  # a token of a shared name reports its own logprob
            written.tokens.append(name)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append(top)
            before, text = self._num_characters, _whole_text(self._format.tokenizer, entry.token_id)
            if entry.token_id in self._visible_token_ids:
                text = self._format.tokenizer.format_token_name(entry.token_id)
            self._num_characters += len(self._decoder.push([entry.token_id]))
            # A token of whole characters also ends an incomplete character, which belongs to the earlier tokens.
            written.text_offset.append(before if text is None else self._num_characters - len(text))


def chat_logprobs(entries: Sequence[TokenLogprob], format: LogprobFormat) -> responses.ChatLogprobs:
    """Return the logprobs of the tokens of a chat completion, or of one event of its stream."""
    content = [
        responses.ChatTokenLogprob(
            token=format.name(entry.token_id),
            logprob=_IMPOSSIBLE if entry.logprob is None else max(entry.logprob, _IMPOSSIBLE),
            bytes=format.added_bytes(entry.token_id),
            top_logprobs=[
                responses.ChatTopLogprob(token=format.name(i), logprob=value, bytes=format.added_bytes(i))
                for i, value in format.top(entry)
            ],
        )
        for entry in entries
    ]
    return responses.ChatLogprobs(content=content)


def prompt_logprobs(entries: Sequence[TokenLogprob], format: LogprobFormat) -> responses.PromptLogprobs:
    """Return for each prompt token its logprob and those of the most likely tokens there; None for the first token."""
    written: responses.PromptLogprobs = []
    for entry in entries:
        if entry.logprob is None or entry.rank is None:
            written.append(None)
            continue
        logprob = max(entry.logprob, _IMPOSSIBLE)
        own = responses.PromptLogprob(logprob=logprob, rank=entry.rank, decoded_token=format.name(entry.token_id))
        at_position = {entry.token_id: own}
        rank, previous = 0, float("nan")
        for number, (token_id, value) in enumerate(format.top(entry), 1):
            if value != previous:  # equally likely tokens share a rank
                rank, previous = number, value
            name = format.name(token_id)
            at_position[token_id] = responses.PromptLogprob(logprob=value, rank=rank, decoded_token=name)
        written.append(at_position)
    return written


def format_token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, a special token's name, or `bytes:\\xNN` if the token's bytes are not whole characters."""
    text = _whole_text(tokenizer, token_id)
    if text is None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
    return text or tokenizer.format_token_name(token_id)


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], *, num_hidden: int) -> str:
    """Return the text of a prompt's token ids, for the request field `echo`, with special tokens by name.

    Special tokens among the first `num_hidden` tokens add no text.
    """
    decoder = StreamDecoder(tokenizer)
    return decoder.push(token_ids[:num_hidden]) + decoder.flush() + tokenizer.decode(token_ids[num_hidden:])


def _whole_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """Return a token's text, empty for a special token; None if the token's bytes are not whole characters."""
    try:
        return tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return None
