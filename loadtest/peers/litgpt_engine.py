"""litgpt's generate as a driver: `python -m loadtest.peers.litgpt_engine DIR PRECISION THREADS`.

One sequence at a time: it batches none.
"""

import sys
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.generate.base import generate_fn
from litgpt.model import GPT

from loadtest.peers.protocol import Prompts, Wave, WaveClock, serve


def main() -> None:
    """Load the model and answer."""
    directory, precision, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    dtype: torch.dtype = getattr(torch, precision)
    with torch.device("meta"):
        model = GPT(Config.from_file(directory / "model_config.yaml"))
    tensors = torch.load(directory / "lit_model.pth", mmap=True, weights_only=True)
    model.load_state_dict(tensors, assign=True)
    model = model.to(dtype).eval()

    @torch.inference_mode()
    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        if len(prompts) > 1:
            raise ValueError("litgpt generates one sequence at a time")
        length = len(prompts[0]) + output_tokens
        model.max_seq_length = length
        model.set_kv_cache(batch_size=1, device=torch.device("cpu"), dtype=dtype)
        clock, told = WaveClock(1), []
        pieces = generate_fn(
            model,
            prompt=torch.tensor(prompts[0]),
            max_returned_tokens=length,
            temperature=0.0,
            include_prompt=False,
            include_eos=False,
        )
        for token in pieces:
            clock.note(0)
            told.append(int(token))
        return clock.wave(told)

    serve(measure)


if __name__ == "__main__":
    main()
