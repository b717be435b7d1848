"""Fake runner without a model. It stores token ids in place of keys and values, and reads them through block tables.

A wrong slot, a wrong table or a stale block changes the history that the runner reads, and so the token that it
samples.
"""

import dataclasses
import time
import zlib
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from model.sampling.params import SamplingParams
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import StepOutputs
from service.engine.scheduling.config import EngineConfig
from service.engine.scheduling.step_plan import MIN_ROWS
from service.ipc.messages import Submit, TokenLogprob

VOCAB_SIZE = 257
EOS = 256
# The maximum length of a sequence in `make_engine`.
CONTEXT = 24
_TOKENIZER = train_bpe([], 257)
_MODEL: Any = SimpleNamespace(config=SimpleNamespace(max_context_length=CONTEXT))


def next_token(history: Sequence[int], seed: int, forbidden: Sequence[int]) -> int:
    """Return a token that depends on all earlier tokens, the seed and the forbidden tokens.

    With seed 3 the token is 0 or 1, if allowed.
    """
    number = zlib.crc32(repr((list(history), seed)).encode())
    if seed == 3:
        number %= 2
    while number % VOCAB_SIZE in forbidden:
        number += 1
    return number % VOCAB_SIZE


class FakeRunner:
    """Fake runner; see the module docstring.

    `fail_at` is the step that raises. `clock` is the simulated time: `step_seconds` per step, and `row_seconds`
    per row. A launched step is computed as late as possible: when it or a later step is read. `order` records step
    numbers: positive for a launch, negative for a read, 0 for a step that ran synchronously.
    """

    min_rows = MIN_ROWS
    is_asynchronous = False

    def __init__(self, num_blocks: int, block_size: int, fail_at: int | None = None) -> None:
        self.step_seconds, self.row_seconds, self._seconds = 1.0, 0.0, 0.0
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token id)
        self.block_size = block_size
        self.num_slots = (num_blocks + 1) * block_size
        self.batches: list[tuple[int, ...]] = []
        self.fail_at = fail_at
        self.order: list[int] = []
        self._queue: deque[FakeLaunched] = deque()
        self._drawn: list[int] = []  # by the previous step

    def clock(self) -> float:
        return self._seconds

    @property
    def num_launched(self) -> int:
        return sum(number > 0 for number in self.order)

    def launch(self, inputs: ModelInputs) -> "FakeLaunched":
        asked = (inputs.rules, inputs.forbidden, inputs.prompt_rows, inputs.wants_logprobs, inputs.masks)
        assert not any(asked), "what a launched step does not give"
        launched = FakeLaunched(self, self.num_launched + 1, _copy(inputs))
        self.order.append(launched.number)
        self._queue.append(launched)
        return launched

    def run(self, inputs: ModelInputs) -> StepOutputs:
        assert not inputs.previous_rows
        self.order.append(0)
        self.compute_queue()
        return self._compute(inputs)

    def compute_queue(self, up_to: int | None = None) -> None:
        """Compute the launched steps in launch order."""
        while self._queue and (up_to is None or self._queue[0].number <= up_to):
            launched = self._queue.popleft()
            try:
                launched.outputs = self._compute(launched.inputs)
            except RuntimeError:
                self._queue.clear()
                raise

    def _compute(self, inputs: ModelInputs) -> StepOutputs:
        metadata = inputs.metadata
        for row, before in enumerate(inputs.previous_rows):
            assert inputs.token_ids_T[row] == 0
            inputs.token_ids_T[row] = self._drawn[before]
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
        self._drawn = token_ids
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


@dataclasses.dataclass
class FakeLaunched:
    """A launched step in the queue of a `FakeRunner`."""

    runner: FakeRunner
    number: int
    inputs: ModelInputs
    outputs: StepOutputs | None = None

    def read(self) -> StepOutputs:
        self.runner.order.append(-self.number)
        self.runner.compute_queue(self.number)
        assert self.outputs is not None
        return self.outputs


def _copy(inputs: ModelInputs) -> ModelInputs:
    metadata = inputs.metadata
    names = ("positions_T", "logit_rows_R", "slot_mapping_T", "block_tables_BN")
    tensors = {name: tensor.clone() for name in names if (tensor := getattr(metadata, name)) is not None}
    metadata = dataclasses.replace(metadata, **tensors)
    return msgspec.structs.replace(inputs, token_ids_T=inputs.token_ids_T.clone(), metadata=metadata)


def expected_tokens(submit: Submit, max_context_length: int) -> list[int]:
    """Return the tokens of a sequence that is computed alone."""
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
    namespace: str = "",
    **params: object,
) -> Submit:
    """Make a submission with defaults for all irrelevant fields."""
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
        cache_namespace=namespace,
    )


def make_engine(**changes: Any) -> tuple[Engine, FakeRunner]:
    """Make a small engine over a fake runner, with `EngineConfig` overrides.

    `fakes_time`: the engine reads the runner's clock. `looks_ahead`: see `Engine`.
    """
    values = {"block_size": 2, "num_blocks": 14, "max_num_running": 4, "max_batched_tokens": 7, **changes}
    runner = FakeRunner(values["num_blocks"], values["block_size"], values.pop("fail_at", None))
    clock = runner.clock if values.pop("fakes_time", False) else time.monotonic
    looks_ahead = values.pop("looks_ahead", None)
    config = EngineConfig(**values)
    return Engine(_MODEL, _TOKENIZER, config, runner=runner, looks_ahead=looks_ahead, clock=clock), runner
