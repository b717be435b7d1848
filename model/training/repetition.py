"""Training against loops: the model completes texts greedily, and learns not to predict what it repeated.

Source: Welleck et al. 2020 (arXiv 1908.04319), section 5.2, sequence-level unlikelihood.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.attention.backends import ATTENTION_BACKENDS
from model.evaluation.prompts import Complete
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer
from model.training.data.batches import UNTRAINED, Batch

_GRAM = 4  # length of a repeated run of tokens
_COMPLETIONS, _MAX_TOKENS = 8, 128  # completions of a step, and their length in tokens
_PROMPT_TOKENS = (8, 48)  # shortest and longest prompt: the beginning of a document


class OwnCompletions:
    """Greedy completions of a model in training. complete: completes prompts, as for the model card."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, complete: Complete) -> None:
        self._served = Transformer(model.config, ATTENTION_BACKENDS["sdpa"])
        self._served.load_state_dict(model.state_dict(), assign=True)  # shares the weights
        self._served.to(next(model.parameters()).device).eval()
        self._tokenizer = tokenizer
        self._complete = complete

    def batch(self, batch: Batch, step: int) -> Batch | None:
        """Return completions of the beginnings of a batch's documents; None if nothing is repeated in any of them.

        The targets are the repeated tokens. A step's prompts depend on its batch and number alone.
        """
        shortest, longest = _PROMPT_TOKENS
        length = shortest + step * 7 % (longest - shortest + 1)  # 7: so that steps in a row differ
        starts = [a for a, b in zip(batch.starts_N, batch.starts_N[1:], strict=False) if b - a > length]
        prompts = [batch.inputs_T[start : start + length].tolist() for start in starts[:_COMPLETIONS]]
        max_tokens = min(_MAX_TOKENS, self._served.config.max_context_length - length)
        params = [SamplingParams(max_tokens=max_tokens, temperature=0.0)] * len(prompts)
        with torch.no_grad():
            completions = self._complete(self._served, self._tokenizer, prompts, params) if prompts else []
        rows = [(ids, repeated_targets(ids, said)) for ids, said in zip(prompts, completions, strict=True)]
        if all(target == UNTRAINED for _, targets in rows for target in targets):
            return None
        inputs = [[*ids, *said][:-1] for ids, said in zip(prompts, completions, strict=True)]
        ends = torch.tensor([0, *map(len, inputs)]).cumsum(0)
        return Batch(
            inputs_T=torch.tensor([token_id for row in inputs for token_id in row]),
            targets_T=torch.tensor([target for _, targets in rows for target in targets]),
            positions_T=torch.cat([torch.arange(len(row)) for row in inputs]),
            starts_N=ends.to(torch.int32),
        )


def repeated_targets(prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
    """Return the target of each input of a completed prompt: the next token if it is part of a repeated run.

    A run of `_GRAM` tokens is repeated if it occurred earlier in prompt and completion. Tokens of the prompt, and all
    other tokens, are UNTRAINED.
    """
    ids, seen = [*prompt, *completion], set[tuple[int, ...]]()
    targets = [UNTRAINED] * (len(ids) - 1)
    for end in range(_GRAM, len(ids) + 1):
        run = tuple(ids[end - _GRAM : end])
        if run in seen:
            for place in range(max(end - _GRAM, len(prompt)), end):
                targets[place - 1] = ids[place]
        seen.add(run)
    return targets


def unlikelihood(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Return the mean of -log(1 - p) over all positions, where p is the probability of the position's target.

    Positions without a target count as 0, so that the loss falls as repetitions become rare.
    """
    rows_N = (targets_T != UNTRAINED).nonzero()[:, 0]
    p_N = torch.softmax(logits_TV[rows_N].float(), dim=-1).gather(1, targets_T[rows_N, None])
    return -torch.log((1.0 - p_N).clamp(min=1e-5)).sum() / len(targets_T)
