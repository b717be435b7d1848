"""Driver of litgpt's generate: `python -m loadtest.peers.drivers.litgpt_engine DIR PRECISION THREADS`.

A wave is one batch of prompts of one length. A single prompt uses `generate_fn`, which reads only the filled part
of the KV-cache. Several prompts use `batched_generate_fn`, which reads its whole length.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.generate.base import batched_generate_fn, generate_fn
from litgpt.model import GPT

from loadtest.peers.drivers.protocol import Prompts, Wave, WaveClock, serve


def main() -> None:
    """Load the model and serve requests."""
    directory, precision, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    dtype: torch.dtype = getattr(torch, precision)
    # Not on the meta device: the rotary tables are in no file, and would stay there.
    model = GPT(Config.from_file(directory / "model_config.yaml"))
    model.load_state_dict(torch.load(directory / "lit_model.pth", mmap=True, weights_only=True), assign=True)
    model = model.to(dtype).eval()

    @torch.inference_mode()
    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        length = len(prompts[0]) + output_tokens
        model.clear_kv_cache()
        model.max_seq_length = length
        model.set_kv_cache(batch_size=len(prompts), device=torch.device("cpu"), dtype=dtype)
        clock, tokens_of_first = WaveClock(len(prompts)), []
        for first in _steps(model, torch.tensor(prompts), length):
            for number in range(len(prompts)):
                clock.note(number)
            tokens_of_first.append(first)
        return clock.wave(tokens_of_first)

    serve(measure)


def _steps(model: GPT, prompts_BT: torch.Tensor, length: int) -> Iterator[int]:
    """Yield the first sequence's token of each step, once all sequences have theirs."""
    if len(prompts_BT) == 1:
        given: dict[str, Any] = {"temperature": 0.0, "include_prompt": False, "include_eos": False}
        for token in generate_fn(model, prompt=prompts_BT[0], max_returned_tokens=length, **given):
            yield int(token)
        return
    given = {"sample_args": {"temperature": 0.0}, "include_prompt": False, "include_eos": False}
    for tokens in batched_generate_fn(model, prompts=prompts_BT, max_returned_tokens=length, **given):
        yield int(tokens[0])


if __name__ == "__main__":
    main()
