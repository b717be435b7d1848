"""Driver of transformers' generate: `python -m loadtest.peers.drivers.transformers_engine DIR PRECISION THREADS`.

A wave is one static batch, computed together from its first token to its last.
"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from loadtest.peers.drivers.protocol import Prompts, Wave, WaveClock, serve


class _Note(StoppingCriteria):
    """Stopping criterion that never stops. It is called after every step and notes the tokens."""

    def __init__(self, clock: WaveClock, num_sequences: int) -> None:
        self._clock = clock
        self._num_sequences = num_sequences

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note a token of every sequence."""
        for number in range(self._num_sequences):
            self._clock.note(number)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    """Load the model and serve requests."""
    directory, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, precision)).eval()

    @torch.inference_mode()
    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        ids_BT = torch.tensor(prompts)
        clock = WaveClock(len(prompts))
        made_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_Note(clock, len(prompts))]),
        )
        return clock.wave(made_BT[0, ids_BT.shape[1] :].tolist())

    serve(measure)


if __name__ == "__main__":
    main()
