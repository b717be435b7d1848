"""Reference implementation of the engine: generation without a KV-cache, for tests and samples after training."""

from collections.abc import Sequence

import torch

from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.sampling.sampler import NO_TOKEN, sample
from model.sampling.token_constraints import TokenRules


@torch.inference_mode()
def generate(
    model: Transformer, prompt_token_ids: Sequence[int], params: SamplingParams, *, eos_token_ids: Sequence[int]
) -> list[int]:
    """Return the token ids of a completion, including the stop or EOS token that ended it. Ignores stop strings.

    The completion also ends after `max_tokens`, at the end of the model's context, and if the token rules leave no
    token to sample. Each new token takes a forward pass over the whole sequence.

    Raises:
        ValueError: the prompt is empty or exceeds the context.
    """
    limit = min(len(prompt_token_ids) + params.max_tokens, model.config.max_context_length)
    if not 0 < len(prompt_token_ids) <= limit:
        raise ValueError(f"the prompt has {len(prompt_token_ids)} tokens; use 1 to {model.config.max_context_length}")
    token_ids = list(prompt_token_ids)
    device = model.token_embedding.weight.device
    ends = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}
    while len(token_ids) < limit:
        metadata = AttentionMetadata.uncached((len(token_ids),), device)
        logits_TV = model(torch.tensor(token_ids, device=device), metadata, None)
        completion = token_ids[len(prompt_token_ids) :]
        forbidden = sorted(ends) if len(completion) < params.min_tokens else []
        rules = TokenRules(params, prompt_token_ids, completion) if params.has_token_rules else None
        if rules is not None:
            forbidden += rules.forbidden
        (next_id,) = sample(logits_TV[-1:], [params], [len(token_ids)], forbidden=[forbidden], rules=[rules]).tolist()
        if next_id == NO_TOKEN:
            break
        token_ids.append(next_id)
        if next_id in ends:
            break
    return token_ids[len(prompt_token_ids) :]
