"""Every mechanism on a CUDA device equals the reference on the CPU, in one pass, in cached chunks and in training."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.nn.reference_generate import generate
from model.sampling.params import SamplingParams
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from tests.engine.fakes import make_submit
from tests.model.configs import VARIANTS, build
from tests.model.paging import PagedRun

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_cached_chunks_equal_the_reference_on_the_cpu(variant: str, chunk: int) -> None:
    reference, model = build(VARIANTS[variant], "eager"), build(VARIANTS[variant]).to("cuda")
    generator = torch.Generator().manual_seed(chunk)
    sequences = [torch.randint(300, (length,), generator=generator) for length in (1, 5, 17, 64)]
    for sequence, actual in zip(sequences, PagedRun(model, sequences).forward_in_chunks(chunk), strict=True):
        expected = reference(sequence, AttentionMetadata.uncached((len(sequence),)), None)
        torch.testing.assert_close(actual.cpu(), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_close_to_the_reference(variant: str) -> None:
    """The tolerance is relative to the largest logit: that of bfloat16, which has eight bits of mantissa."""
    model = build(VARIANTS[variant])
    ids = torch.arange(40)
    expected = model(ids, AttentionMetadata.uncached((40,)), None)
    model.to("cuda", torch.bfloat16)
    actual = model(ids.to("cuda"), AttentionMetadata.uncached((40,), "cuda"), None).cpu()
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_those_of_the_reference(variant: str) -> None:
    generator = torch.Generator().manual_seed(5)
    ids, targets = torch.randint(300, (2, 75), generator=generator)
    gradients = []
    for backend, device in (("eager", "cpu"), ("sdpa", "cuda")):
        model = build(VARIANTS[variant], backend).to(device).requires_grad_(True)
        metadata = AttentionMetadata.uncached((25, 25, 25), device)
        functional.cross_entropy(model(ids.to(device), metadata, None), targets.to(device)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        actual = gradients[1][name]
        assert expected is not None
        assert actual is not None
        torch.testing.assert_close(actual.cpu(), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)


def test_plain_attention_uses_the_flash_kernel() -> None:
    """With every other kernel forbidden, the attention of training still runs, and equals the reference."""
    q, k, v = (torch.randn(128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    form = AttentionForm(layer=0, scale=0.125, window=None, bias=None)
    metadata = AttentionMetadata.uncached((64, 64), "cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = ATTENTION_BACKENDS["sdpa"].attend(q, k, v, form=form, metadata=metadata, kv_cache=None)
    eager = ATTENTION_BACKENDS["eager"].attend(q, k, v, form=form, metadata=metadata, kv_cache=None)
    torch.testing.assert_close(flash.float(), eager.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_generates_the_tokens_of_the_reference(variant: str) -> None:
    tokenizer = train_bpe([(Path(__file__).parents[1] / "data" / "aesop.txt").read_text()], 300)
    model = build(VARIANTS[variant]).to("cuda")
    (eos,) = tokenizer.eos_token_ids
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = [list(range(10, 10 + length)) for length in (3, 9, 20)]
    engine = Engine(model, tokenizer, EngineConfig(block_size=4, num_blocks=64, max_batched_tokens=64))
    for number, prompt in enumerate(prompts):
        engine.submit(make_submit(str(number), prompt, max_tokens=20, temperature=0.0, ignore_eos=True))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().events:
            found.setdefault(delta.uid, []).extend(delta.token_ids)
    for number, prompt in enumerate(prompts):
        assert found[str(number)] == generate(model, prompt, params, eos_token_ids=(eos,))
