"""Batch completion with a loaded model, by the engine and without a server."""

from collections.abc import Sequence

from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer
from service.engine.engine import Engine, create_submit
from service.engine.scheduling.config import EngineConfig

_MAX_NUM_RUNNING = 32
_BLOCK_SIZE = 16


def complete_batch(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Return the token ids of each prompt's completion, with the final stop token if there is one.

    Implements `model.evaluation.prompts.Complete`.

    Raises:
        ValueError: a prompt cannot be completed; the message has the reason.
    """
    lengths = [len(ids) + wanted.max_tokens for ids, wanted in zip(prompts, params, strict=True)]
    num_running = min(_MAX_NUM_RUNNING, len(prompts))
    longest = max(lengths, default=1)
    config = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=max(1, num_running) * -(-longest // _BLOCK_SIZE),
        max_num_running=_MAX_NUM_RUNNING,
    )
    engine = Engine(model, tokenizer, config)
    for number, (ids, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(create_submit(str(number), ids, wanted))
    completions: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step().events:
            completions[int(event.uid)] += event.token_ids
            if event.finish is not None and event.finish.error is not None:
                raise ValueError(event.finish.error)
    return completions
