"""Fake model runner with a simulated clock, for tests of the engine."""

import copy
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import torch

from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import StepOutputs
from service.engine.scheduling.step_plan import MIN_ROWS
from service.ipc.messages import TokenLogprob


def next_token(history: Sequence[int], seed: int, forbidden: Sequence[int], vocab_size: int) -> int:
    """Return a token id computed from all earlier tokens and the seed, never a forbidden id. Seed 3 prefers 0 and 1."""
    number = zlib.crc32(repr((list(history), seed)).encode())
    if seed == 3:
        number %= 2
    while number % vocab_size in forbidden:
        number += 1
    return number % vocab_size


class FakeRunner:
    """Runner without a model, which stores token ids in place of keys and values and reads them through block tables.

    A wrong slot, a wrong block table or a stale block changes the token ids that the runner reads, and so the token
    that it samples. A launched step is computed as late as possible: before the next `run`, or when outputs are read.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, min_rows: int = MIN_ROWS) -> None:
        self.min_rows = min_rows
        self.is_asynchronous = False
        self.step_seconds, self.row_seconds, self._seconds = 1.0, 0.0, 0.0
        self.slots: dict[int, tuple[int, int]] = {}  # position and token id stored in each slot
        self.block_size = block_size
        self.num_slots = (num_blocks + 1) * block_size
        self.batches: list[tuple[int, ...]] = []  # query lengths of each computed step
        self.fail_at: int | None = None  # number of the step that raises RuntimeError
        self.max_rows: int | None = None  # larger steps raise OutOfMemoryError
        self.order: list[int] = []  # step numbers: positive for a launch, negative for a read, 0 for a run at once
        self._vocab_size = vocab_size
        self._queue: deque[tuple[int, ModelInputs]] = deque()
        self._outputs: dict[int, StepOutputs] = {}  # of launched steps that are computed and not read
        self._sampled: list[int] = []  # by the previous step

    def clock(self) -> float:
        return self._seconds

    @property
    def num_launched(self) -> int:
        return sum(number > 0 for number in self.order)

    def run(self, inputs: ModelInputs) -> StepOutputs:
        """Compute all launched steps, then the step with `inputs`, without a model, and return the outputs."""
        assert not inputs.previous_rows
        self.order.append(0)
        self._compute_queue()
        return self._compute(inputs)

    def launch(self, inputs: ModelInputs) -> Callable[[], StepOutputs]:
        """Queue a step. Return a function that computes the queued steps up to this step, and returns its outputs."""
        asked = (inputs.rules, inputs.forbidden, inputs.prompt_rows, inputs.wants_logprobs, inputs.masks)
        assert not any(asked), "a launched step must need nothing of the host"
        number = self.num_launched + 1
        self.order.append(number)
        self._queue.append((number, copy.deepcopy(inputs)))

        def read() -> StepOutputs:
            self.order.append(-number)
            self._compute_queue(number)
            return self._outputs.pop(number)

        return read

    def _compute_queue(self, up_to: int | None = None) -> None:
        while self._queue and (up_to is None or self._queue[0][0] <= up_to):
            number, inputs = self._queue.popleft()
            try:
                self._outputs[number] = self._compute(inputs)
            except RuntimeError:
                self._queue.clear()
                raise

    def _compute(self, inputs: ModelInputs) -> StepOutputs:
        """Store the token ids of a step in their slots, and sample from the stored token ids of each sequence."""
        metadata = inputs.metadata
        for row, before in enumerate(inputs.previous_rows):
            assert inputs.token_ids_T[row] == 0
            inputs.token_ids_T[row] = self._sampled[before]
        self._seconds += self.step_seconds + self.row_seconds * len(inputs.token_ids_T)
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        if self.max_rows is not None and len(inputs.token_ids_T) > self.max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.batches.append(metadata.query_lengths)
        if self.fail_at == len(self.batches):
            raise RuntimeError("the fake runner fails at this step")
        ids, slots = inputs.token_ids_T.tolist(), metadata.slot_mapping_T.tolist()
        for token_id, slot, position in zip(ids, slots, metadata.positions_T.tolist(), strict=True):
            assert 0 <= slot < self.num_slots
            self.slots[slot] = (position, token_id)
        row_of_token = [row for row, length in enumerate(metadata.query_lengths) for _ in range(length)]
        logit_rows = list(range(len(ids))) if metadata.logit_rows_R is None else metadata.logit_rows_R.tolist()
        token_ids = []
        for index, (param, position) in enumerate(zip(inputs.params, inputs.positions, strict=True)):
            sampled_after = logit_rows[index]
            assert metadata.positions_T[sampled_after] == position - 1
            row = row_of_token[sampled_after]
            history = self._history(metadata.block_tables_BN[row].tolist(), position)
            forbidden = inputs.forbidden[index] if inputs.forbidden else ()
            token_ids.append(next_token(history, param.seed, forbidden, self._vocab_size))
        self._sampled = token_ids
        scores = {
            chunk.uid: [TokenLogprob(token_id=target, logprob=0.0, rank=1, top=()) for target in chunk.scored_ids]
            for chunk, _ in inputs.prompt_rows
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
