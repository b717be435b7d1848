"""Driver of transformers' generate: `python -m loadtest.peers.drivers.transformers_engine DIR PRECISION THREADS`.

A wave is one static batch, computed together from its first token to its last.
"""

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from loadtest.peers.drivers.protocol import Prompts, Wave, serve


class _StepClock(StoppingCriteria):
    """Stopping criterion that never stops. It is called after every step and notes the time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the time of a step, which gave every sequence a token."""
        self.seconds.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    """Load the model and serve requests."""
    directory, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, precision)).eval()

    @torch.inference_mode()
    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        ids_BT = torch.tensor(prompts)
        clock, began = _StepClock(), time.perf_counter()
        made_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        ended = time.perf_counter()
        later = len(prompts) * (len(clock.seconds) - 1)
        return Wave(clock.seconds[0] - began, ended - began, later, made_BT[0, ids_BT.shape[1] :].tolist())

    serve(measure)


if __name__ == "__main__":
    main()
