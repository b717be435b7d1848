"""On a CUDA device steps with prompts, recorded in pieces: the numbers of the same steps kernel by kernel."""

import logging

import pytest
import torch

from model.attention.kernel_selection import KernelContext, choose
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.gpu.fused_modules import fuse
from model.gpu.quantization import FORMATS
from model.gpu.quantization import choose as select_quantization
from model.nn.linear import replace_linears_by
from model.nn.transformer import Transformer
from service.engine.execution.cuda_graphs import CudaCapture
from service.engine.execution.gpu_setup import create_graphed_runner
from service.engine.execution.prefill_graphs import CudaPieces, GraphedTransformer, capture_prompts
from service.engine.scheduling.config import EngineConfig
from tests.model.configs import VARIANTS, build

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SIZE, ROWS = 16, 300


def paged(variant: str) -> Transformer:
    model = build(VARIANTS[variant]).to("cuda", torch.bfloat16)
    place = KernelContext(config=model.config, device=CUDA, dtype=torch.bfloat16, block_size=SIZE)
    backend = choose(place).backend
    for layer in model.layers:
        layer.attention.backend = backend
    fuse(model)
    return model


def step(lengths: tuple[int, ...]) -> tuple[torch.Tensor, AttentionMetadata]:
    """Prompts of these lengths, each in blocks of its own."""
    width = -(-max(lengths) // SIZE)
    tables_BN = torch.arange(len(lengths) * width).view(len(lengths), width)
    positions = [torch.arange(length) for length in lengths]
    slots = [table[at // SIZE] * SIZE + at % SIZE for table, at in zip(tables_BN, positions, strict=True)]
    metadata = AttentionMetadata(
        query_lengths=lengths,
        context_lengths=lengths,
        positions_T=torch.cat(positions),
        slot_mapping_T=torch.cat(slots),
        block_tables_BN=tables_BN,
    )
    return torch.arange(sum(lengths)).remainder(50).cuda(), metadata.to(CUDA)


@pytest.mark.parametrize("variant", ["rotary-gqa", "gpt2", "neox", "gemma", "olmo2", "qwen2"])
@pytest.mark.parametrize("quantize", ["none", *FORMATS])
@torch.inference_mode()
def test_a_recorded_step_is_the_step(variant: str, quantize: str) -> None:
    model = paged(variant)
    if quantize != "none":
        replace_linears_by(model, select_quantization(quantize, CUDA, torch.bfloat16).make)
    before = torch.cuda.memory_reserved()
    assert capture_prompts(model, CudaPieces(), ROWS)[0] == ROWS
    assert torch.cuda.memory_reserved() - before < 512 * 2**20
    longest = model.config.max_context_length
    for count in (1, 5, 64, 65, 200, ROWS, ROWS + 1):
        lengths = tuple(min(longest, count - at) for at in range(0, count, longest))
        ids_T, metadata = step(lengths)
        caches = [
            KVCache(model.config, num_blocks=512, block_size=SIZE, dtype=torch.bfloat16, device=CUDA) for _ in range(2)
        ]
        expected = Transformer.hidden(model, ids_T, metadata, caches[0])
        found = model.hidden(ids_T, metadata, caches[1])
        assert (found.float() - expected.float()).abs().max() <= 3e-2 * expected.float().abs().max()


def test_the_engines_runner_records_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service.engine.execution.gpu_setup")
    model = paged("qwen2")
    config = EngineConfig(block_size=SIZE, num_blocks=64, max_num_running=4, max_batched_tokens=128)
    create_graphed_runner(model, config, 257, CudaCapture())
    assert type(model) is GraphedTransformer
    assert "CUDA graphs captured for prefill steps of up to 128 tokens (3 sizes)" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
