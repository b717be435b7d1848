"""Benchmarks of a GPU, a part at a time, as run by `loadtest/gpu/suite.sh`.

    python -m loadtest.gpu.bench_gpu PART --out FILE [--checkpoint DIR]

Parts: card (the device, its limits, and the available attention kernels), attention (kernels), decode (steps of a
random model of 1.5 billion parameters against memory bandwidth), engine (the default model as it is served) and
quantized (decode steps with int8 and fp8 weights).

Without a CUDA device a part is reported as absent. `--tiny` runs the same code with small sizes on any device, for
tests.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu import measurements
from loadtest.gpu.bench_setting import full, tiny
from loadtest.measurement.provenance import provenance, tell

PROGRAM = "python -m loadtest.gpu.bench_gpu"
PARTS = ("card", "attention", "decode", "engine", "quantized")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part and write JSON. Return 0, also without a device, which the JSON reports."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Measure one part of the GPU benchmarks.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON output file (default: standard output)")
    text = "checkpoint of the part `engine`"
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/kvasir-9m"), help=text)
    parser.add_argument("--tiny", action="store_true", help="small sizes on any device, for tests")
    parsed = parser.parse_args(given)
    has_gpu = torch.cuda.is_available()
    result: dict[str, Any] = provenance(PROGRAM, given)
    if not has_gpu and not parsed.tiny:
        tell(result | {"absent": "no CUDA device"}, parsed.out)
        return 0
    device = torch.device("cuda" if has_gpu else "cpu")
    bench = tiny(device) if parsed.tiny else full(device)
    measure = getattr(measurements, parsed.part)
    figures = measure(bench, parsed.checkpoint) if parsed.part == "engine" else measure(bench)
    tell(result | figures, parsed.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
