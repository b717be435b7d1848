"""Driver of OpenVINO GenAI: `python -m loadtest.peers.drivers.openvino_engine DIR HINT THREADS CACHE`.

DIR holds the model in OpenVINO's format. HINT is f32 or bf16. CACHE is the size of the KV-cache in GB.
"""

import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from loadtest.peers.drivers.protocol import Prompts, Wave, serve


def main() -> None:
    """Compile the model, then serve the requests on standard input."""
    directory, hint, threads, cache = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = int(cache)
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties, {})
    uids = iter(range(2**62))

    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        began = time.perf_counter()
        handles = [pipeline.add_request(next(uids), ids, config) for ids in inputs]
        waiting = handles
        while waiting:
            pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        num_early = sum(map(_num_read, handles))
        first = time.perf_counter() - began
        while pipeline.has_non_finished_requests():
            pipeline.step()
        total = time.perf_counter() - began
        return Wave(first, max(total, first), len(prompts) * output_tokens - num_early)

    serve(measure)


def _num_read(handle: Any) -> int:
    """Take the new tokens of a sequence from OpenVINO and return their number."""
    count = 0
    while handle.can_read():
        count += sum(len(output.generated_ids) for output in handle.read().values())
    return count


if __name__ == "__main__":
    main()
