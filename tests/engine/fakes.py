"""A runner without a model: it keeps token ids where keys and values would be, and reads them back through the tables.

A wrong slot, a wrong table or a stale block changes the history it sees, and so the token it draws.
"""

import time
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from model.sampling_params import SamplingParams
from model.training.bpe import train_bpe
from service.engine.config import EngineConfig
from service.engine.engine import Engine
from service.engine.inputs import ModelInputs
from service.engine.plan import MIN_ROWS
from service.engine.runner import StepOutputs
from service.messages import Submit, TokenLogprob

VOCAB_SIZE = 257
EOS = 256
# The longest any sequence of `make_engine` gets.
CONTEXT = 24
_TOKENIZER = train_bpe([], 257)
_MODEL: Any = SimpleNamespace(config=SimpleNamespace(max_context_length=CONTEXT))


def next_token(history: Sequence[int], seed: int, forbidden: Sequence[int]) -> int:
    """A token that depends on every earlier token, the seed and what is forbidden. Of seed 3 it is 0 or 1 if it may."""
    number = zlib.crc32(repr((list(history), seed)).encode())
    if seed == 3:
        number %= 2
    while number % VOCAB_SIZE in forbidden:
        number += 1
    return number % VOCAB_SIZE


class FakeRunner:
    """See the module. `fail_at` raises in that step. `clock` is what its steps have taken: of `step_seconds`, and
    `row_seconds` for each of their rows."""

    min_rows = MIN_ROWS

    def __init__(self, num_blocks: int, block_size: int, fail_at: int | None = None) -> None:
        self.step_seconds, self.row_seconds, self._seconds = 1.0, 0.0, 0.0
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token id)
        self.block_size = block_size
        self.num_slots = (num_blocks + 1) * block_size
        self.batches: list[tuple[int, ...]] = []
        self.fail_at = fail_at

    def clock(self) -> float:
        return self._seconds

    def run(self, inputs: ModelInputs) -> StepOutputs:
        metadata = inputs.metadata
        self._seconds += self.step_seconds + self.row_seconds * len(inputs.token_ids_T)
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        self.batches.append(metadata.query_lengths)
        if self.fail_at == len(self.batches):
            raise RuntimeError("the runner was told to fail")
        ids, slots = inputs.token_ids_T.tolist(), metadata.slot_mapping_T.tolist()
        for token_id, slot, position in zip(ids, slots, metadata.positions_T.tolist(), strict=True):
            assert 0 <= slot < self.num_slots
            self.slots[slot] = (position, token_id)
        row_of_token = [row for row, length in enumerate(metadata.query_lengths) for _ in range(length)]
        logit_rows = list(range(len(ids))) if metadata.logit_rows_R is None else metadata.logit_rows_R.tolist()
        token_ids = []
        for index, (param, position) in enumerate(zip(inputs.params, inputs.positions, strict=True)):
            drawn_after = logit_rows[index]
            assert metadata.positions_T[drawn_after] == position - 1
            row = row_of_token[drawn_after]
            history = self._history(metadata.block_tables_BN[row].tolist(), position)
            token_ids.append(next_token(history, param.seed, inputs.forbidden[index] if inputs.forbidden else ()))
        scores = {
            rows.uid: [TokenLogprob(token_id=target, logprob=0.0, rank=1, top=()) for target in rows.targets]
            for rows in inputs.prompt_rows
        }
        return StepOutputs(token_ids=token_ids, logprobs=[None] * len(token_ids), prompt_logprobs=scores)

    def _history(self, table: list[int], length: int) -> list[int]:
        history = []
        for position in range(length):
            slot = table[position // self.block_size] * self.block_size + position % self.block_size
            stored_position, token_id = self.slots[slot]
            assert stored_position == position
            history.append(token_id)
        return history


def expected_tokens(submit: Submit, max_context_length: int) -> list[int]:
    """What a sequence must come to, computed alone."""
    params, history = submit.params, list(submit.prompt_token_ids)
    ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, EOS}
    drawn: list[int] = []
    while len(drawn) < params.max_tokens and len(history) < max_context_length:
        forbidden = sorted(ends) if len(drawn) < params.min_tokens else []
        begun = [(tuple(drawn[len(drawn) - len(word) + 1 :]), word) for word in params.bad_word_ids]
        forbidden += [word[-1] for before, word in begun if before == word[:-1]]
        drawn.append(next_token(history, params.seed, forbidden))
        history.append(drawn[-1])
        if drawn[-1] in ends:
            break
    return drawn


def make_submit(
    uid: str,
    prompt: Sequence[int],
    *,
    attempt: int = 0,
    prior: Sequence[int] = (),
    deadline: float | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    **params: object,
) -> Submit:
    """A submission with what a test does not care about filled in."""
    return Submit(
        uid=uid,
        attempt=attempt,
        prompt_token_ids=tuple(prompt),
        prior_token_ids=tuple(prior),
        params=SamplingParams(**{"max_tokens": 8, **params}),  # type: ignore[arg-type]
        arrival_seconds=arrival,
        deadline_seconds=deadline,
        priority=priority,
        cache_salt=salt,
    )


def make_engine(**changes: Any) -> tuple[Engine, FakeRunner]:
    """A small engine over a fake runner, with `EngineConfig` values changed at will.

    `fakes_time`: it goes by the runner's clock.
    """
    values = {"block_size": 2, "num_blocks": 14, "max_num_running": 4, "max_batched_tokens": 7, **changes}
    runner = FakeRunner(values["num_blocks"], values["block_size"], values.pop("fail_at", None))
    clock = runner.clock if values.pop("fakes_time", False) else time.monotonic
    return Engine(_MODEL, _TOKENIZER, EngineConfig(**values), runner=runner, clock=clock), runner
