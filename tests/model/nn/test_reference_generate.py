"""Stop conditions and limits of the reference implementation `generate`."""

import pytest

from model.nn.reference_generate import generate
from model.sampling.params import SamplingParams
from tests.model.configs import VARIANTS, build

MODEL = build(VARIANTS["rotary-gqa"])
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def test_a_seed_repeats_a_completion_and_another_seed_changes_it() -> None:
    params = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
    first, again, other = (generate(MODEL, [5, 6], p, eos_token_ids=(0,)) for p in params)
    assert first == again != other


def test_generation_ends_at_eos_stop_token_length_and_context() -> None:
    whole = generate(MODEL, [1, 2, 3], GREEDY, eos_token_ids=(0,))
    assert len(whole) == 20
    end = whole[4]
    cut = whole[: whole.index(end) + 1]
    assert generate(MODEL, [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0), eos_token_ids=(end,)) == cut
    stop = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(end,))
    assert generate(MODEL, [1, 2, 3], stop, eos_token_ids=(0,)) == cut
    long = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    assert len(generate(MODEL, [1] * 60, long, eos_token_ids=(0,))) == 4


def test_min_tokens_forbids_an_earlier_end() -> None:
    whole = generate(MODEL, [1, 2, 3], GREEDY, eos_token_ids=(0,))
    params = SamplingParams(max_tokens=20, temperature=0.0, min_tokens=10)
    late = generate(MODEL, [1, 2, 3], params, eos_token_ids=(whole[0],))
    assert len(late) >= 10
    assert whole[0] not in late[:10]


@pytest.mark.parametrize("length", [0, 65])
def test_prompts_that_do_not_fit_are_rejected(length: int) -> None:
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens"):
        generate(MODEL, [1] * length, GREEDY, eos_token_ids=(0,))
