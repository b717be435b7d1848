"""Sampling parameters of one completion: a frozen, torch-free value."""

from dataclasses import dataclass

MAX_LOGPROBS = 20
# Before min_tokens every stop token is masked in every step: thousands would slow the whole batch.
MAX_STOP_TOKEN_IDS = 128
# Limits on rules for single tokens: each sequence carries its rules to the engine, and every step applies them.
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
PENALTY_RANGE = (-2.0, 2.0)
REPETITION_RANGE = (0.01, 100.0)  # a logit times either limit stays far within float32's range
LOGIT_BIAS_RANGE = (-100.0, 100.0)
_RANGES = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": PENALTY_RANGE,
    "frequency_penalty": PENALTY_RANGE,
    "repetition_penalty": REPETITION_RANGE,
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters and end conditions of one completion.

    temperature: greedy if under 1e-5.
    top_k, top_p, min_p: filters of tokens; 0, 1 and 0 switch them off.
    seed: seed of all random numbers. A token's random number depends on the seed and the token's position alone.
    logprobs: number of most likely tokens to report beside each sampled token; None: report no logprobs.
    prompt_logprobs: the same for the prompt's tokens, except the first, which has no logprob.
    max_tokens: maximum length of the completion; with 0 only the prompt is computed, for its logprobs or embedding.
    min_tokens: no end-of-text, stop token or stop string ends the completion before that many tokens.
    logit_bias: pairs of a token id and the number added to its logit.
    allowed_token_ids: the only tokens that may be sampled; empty allows all tokens.
    bad_word_ids: forbidden words as token ids. A word's last id is never sampled right after its other ids.
    visible_token_ids: special tokens whose names are part of the completion's text, and which a grammar may produce.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    visible_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be over 0 and at most 1, not {self.top_p!r}")
        for name in ("max_tokens", "min_tokens", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, not {self.seed!r}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not contain an empty string")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} ids; give at most {MAX_STOP_TOKEN_IDS}")
        low, high = LOGIT_BIAS_RANGE
        for token_id, bias in self.logit_bias:
            if not low <= bias <= high:
                raise ValueError(f"logit_bias of token {token_id} must be between {low:g} and {high:g}, not {bias!r}")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias must not name a token id twice")
        if not all(self.bad_word_ids):
            raise ValueError("bad_word_ids must not contain an empty word")

    @property
    def greedy(self) -> bool:
        """Return whether the temperature is under 1e-5, which means greedy: dividing logits by it could overflow."""
        return self.temperature < 1e-5

    def hidden_token_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """Return the tokens that end the completion and add no text; none with `include_stop_str_in_output`."""
        if self.include_stop_str_in_output:
            return frozenset()
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)))

    @property
    def has_penalties(self) -> bool:
        """Return whether the presence, frequency or repetition penalty is switched on."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_token_rules(self) -> bool:
        """Return whether any penalty, logit bias, allowed token id or forbidden word is set."""
        return self.has_penalties or bool(self.logit_bias or self.allowed_token_ids or self.bad_word_ids)
