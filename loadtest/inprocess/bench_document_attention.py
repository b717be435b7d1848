"""Benchmark of attention over packed documents, forward and backward: native kernel against flash attention.

python -m loadtest.inprocess.bench_document_attention

PyTorch's flash attention runs one document at a time.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from loadtest.measurement.provenance import quiet_or_warned
from model.system.limits import usable_cpus
from model.training.attention import attend_documents
from service.worker.engine_factory import keep_freed_memory

_LENGTHS = (100, 200, 300, 512, 1024)
_TOKENS = 8192
_HEADS, _KV_HEADS, _HEAD_DIM = 5, 1, 64  # shape of the default model


def _one_by_one(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts: Sequence[int]) -> Tensor:
    out = []
    for start, end in itertools.pairwise(starts):
        q_HSD, k_KSD, v_KSD = (x[start:end].transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
        groups = len(q_HSD) // len(k_KSD)
        q_KGSD = q_HSD.unflatten(0, (-1, groups))
        k_KGSD, v_KGSD = (x[:, None].expand(-1, groups, -1, -1) for x in (k_KSD, v_KSD))
        out.append(scaled_dot_product_attention(q_KGSD, k_KGSD, v_KGSD, is_causal=True).flatten(0, 1).transpose(0, 1))
    return torch.cat(out)


def _milliseconds(attend: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor) -> float:
    began = time.perf_counter()
    torch.autograd.grad(attend(), inputs, grad)
    return 1000 * (time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of medians, and of the medians of ratios within pairs. Returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m loadtest.inprocess.bench_document_attention", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="repeats (default: 9)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args(given)
    quiet_or_warned(parser.prog)
    keep_freed_memory()
    torch.set_num_threads(usable_cpus())
    print(f"{torch.get_num_threads()} threads, {_TOKENS} tokens, {_HEADS} heads over {_KV_HEADS}, {arguments.dtype}")
    print("| tokens per document | flash, ms | Kvasir, ms | flash / Kvasir |\n|---:|---:|---:|---:|")
    for length in _LENGTHS:
        starts = [*range(0, _TOKENS, length), _TOKENS]
        starts_N = torch.tensor(starts, dtype=torch.int32)
        inputs = [
            torch.randn(_TOKENS, heads, _HEAD_DIM, dtype=getattr(torch, arguments.dtype), requires_grad=True)
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        ]
        q_THD, k_TKD, v_TKD = inputs
        grad_THD = torch.randn_like(q_THD)

        def flash(qkv: tuple[Tensor, Tensor, Tensor] = (q_THD, k_TKD, v_TKD), starts: Sequence[int] = starts) -> Tensor:
            return _one_by_one(*qkv, starts)

        def ours(qkv: tuple[Tensor, Tensor, Tensor] = (q_THD, k_TKD, v_TKD), starts_N: Tensor = starts_N) -> Tensor:
            out: Tensor = attend_documents(*qkv, starts_N, max(_LENGTHS))[0]
            return out

        pairs = [
            (_milliseconds(flash, inputs, grad_THD), _milliseconds(ours, inputs, grad_THD))
            for _ in range(arguments.rounds + 1)
        ][1:]  # without the warm-up
        theirs_ms, ours_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        print(f"| {length} | {theirs_ms:.0f} | {ours_ms:.0f} | {ratio:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
