"""How one completion is drawn and when it ends: a frozen, torch-free value."""

from dataclasses import dataclass

MAX_LOGPROBS = 20
# Each is forbidden one by one in every draw before min_tokens: thousands would slow the steps of everybody.
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one completion is drawn and when it ends.

    `temperature == 0`, or nearly, is greedy. `top_k == 0`, `top_p == 1` and `min_p == 0` switch those filters off.
    `seed` fixes every draw: draw number i of a sequence depends on (seed, position) alone, see `sampling`.
    `logprobs` is None for none, else how many alternatives to report beside the sampled token.
    `prompt_logprobs` likewise for the prompt's tokens, the first of which has none.
    `max_tokens == 0` computes the prompt (for `prompt_logprobs`) and generates nothing.
    `min_tokens` forbids ending by end-of-text, stop token or stop string before that many tokens.

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

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, not {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be over 0 and at most 1, not {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p!r}")
        for name in ("max_tokens", "min_tokens", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, not {self.seed!r}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} allowed"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MAX_LOGPROBS}, not {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether every draw takes the most likely token.

        Below 1e-5 a temperature would overflow float32, and means the same.
        """
        return self.temperature < 1e-5
