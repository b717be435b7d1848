"""Driver of transformers' generate_batch.

    python -m loadtest.peers.drivers.transformers_batching DIR PRECISION THREADS

Continuous batching over a paged cache. Times are those that transformers notes for each token, on the same clock.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from loadtest.peers.drivers.protocol import Prompts, Wave, serve

_BLOCKS, _STEP_TOKENS = 128, 512  # blocks of 256 tokens


def main() -> None:
    """Load the model and serve requests."""
    directory, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, precision), attn_implementation="paged|sdpa"
    ).eval()

    # By default it takes most of the memory for its cache. This size holds the largest wave.
    batching = ContinuousBatchingConfig(num_blocks=_BLOCKS, max_batch_tokens=_STEP_TOKENS)

    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        config = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        began = time.perf_counter()
        made = model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=batching, record_timestamps=True
        )
        outputs = list(made.values())
        times = [output.timestamps or [] for output in outputs]
        if len(outputs) != len(prompts) or {len(stamps) for stamps in times} != {output_tokens}:
            raise RuntimeError(f"got {[len(stamps) for stamps in times]} tokens, expected {output_tokens} each")
        first = max(stamps[0] for stamps in times)
        later = sum(at > first for stamps in times for at in stamps)
        last = max(stamps[-1] for stamps in times)
        return Wave(first - began, last - began, later, list(outputs[0].generated_tokens))

    serve(measure)


if __name__ == "__main__":
    main()
