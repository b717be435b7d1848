"""Model inputs that are updated from step to step equal inputs built from scratch."""

import random
from typing import Any

import msgspec
import pytest
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from service.engine import engine as engine_module
from service.engine.execution.model_inputs import InputBuilder, ModelInputs
from service.engine.scheduling.step_plan import MIN_ROWS, StepPlan
from tests.engine.fakes import make_engine, make_submit

_TENSORS = ("positions_T", "logit_rows_R", "slot_mapping_T", "block_tables_BN")


class Compared(InputBuilder):
    """Input builder that also builds each step's inputs from scratch, compares them, and counts updated steps."""

    num_moved = num_steps = 0

    def build(self, plan: StepPlan, masks: Any = None) -> ModelInputs:
        sizes = {"block_size": self._block_size, "scratch_block": self._scratch_block, "min_rows": self._min_rows}
        expected = InputBuilder(**sizes).build(plan, masks)
        previous = self._previous
        found = super().build(plan, masks)
        Compared.num_moved += previous is not None and self._previous is previous
        Compared.num_steps += 1
        assert plain(found) == plain(expected)
        return found


def plain(inputs: ModelInputs) -> dict[str, Any]:
    """Return all fields of a step's inputs, with tensors as dtypes and lists, to compare two inputs."""
    named = {name: getattr(inputs, name) for name in inputs.__struct_fields__}
    metadata: AttentionMetadata = named.pop("metadata")
    named |= {"query_lengths": metadata.query_lengths, "context_lengths": metadata.context_lengths}
    named |= {name: getattr(metadata, name) for name in _TENSORS}
    return {name: (v.dtype, v.tolist()) if isinstance(v, Tensor) else v for name, v in named.items()}


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compared, "num_moved", 0)
    monkeypatch.setattr(Compared, "num_steps", 0)
    monkeypatch.setattr(engine_module, "InputBuilder", Compared)


def random_submit(uid: str, rng: random.Random) -> Any:
    params: dict[str, Any] = {
        "max_tokens": (max_tokens := rng.randint(0, 12)),
        "min_tokens": min(max_tokens, rng.choice([0, 0, 3])),
        "seed": rng.randint(0, 3),
        "temperature": rng.choice([0.0, 1.0]),
        "logprobs": rng.choice([None, None, 1]),
        "prompt_logprobs": rng.choice([None, None, 0]),
        "bad_word_ids": rng.choice([(), (), ((0, 1),)]),
        "ignore_eos": True,
    }
    return make_submit(uid, [rng.randint(0, 3) for _ in range(rng.randint(1, 11))], **params)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("min_rows", [1, MIN_ROWS])
def test_updated_inputs_equal_rebuilt_inputs(min_rows: int, drafts: int, looks_ahead: bool) -> None:
    """Sequences arrive, are cancelled and resubmitted, in a pool that is too small."""
    num_preemptions = 0
    for seed in range(12):
        rng = random.Random(seed)
        engine, _ = make_engine(
            fakes_time=True,
            max_draft_tokens=drafts,
            looks_ahead=looks_ahead,
            block_size=rng.choice([1, 2, 5]),
            min_rows=min_rows,
        )
        submits = [random_submit(f"s{number}", rng) for number in range(12)]
        for submit in submits:
            engine.submit(submit)
            for _ in range(rng.choice([0, 1, 8])):
                num_preemptions += engine.step().stats.num_preemptions
            if rng.random() < 0.2:
                engine.cancel(rng.choice(submits).uid)
            if rng.random() < 0.2:
                engine.submit(msgspec.structs.replace(submit, attempt=1))
        while engine.has_work:
            num_preemptions += engine.step().stats.num_preemptions
        engine.check_integrity()
    assert num_preemptions > 5
    assert Compared.num_moved > Compared.num_steps / 10


def test_inputs_are_rebuilt_only_when_the_widest_block_table_grows() -> None:
    """In 20 steps with blocks of 5 tokens, inputs are rebuilt only at the start and when the block table grows."""
    engine, runner = make_engine(block_size=5)
    engine.submit(make_submit("a", [1, 2, 3], max_tokens=20, ignore_eos=True))
    while engine.has_work:
        engine.step()
    num_tables = len({position // 5 for position, _ in runner.slots.values()})
    assert Compared.num_steps == 20
    assert Compared.num_moved == Compared.num_steps - 1 - num_tables
