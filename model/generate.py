"""Generation without a cache: the slow, obvious twin of the engine, and its tests' oracle.

Every token recomputes the whole sequence. Same sampling, same ends, none of the machinery.
"""

from collections.abc import Sequence

import torch

from model.attention.metadata import AttentionMetadata
from model.sampling import NO_TOKEN, sample
from model.sampling_params import SamplingParams
from model.token_rules import TokenRules
from model.transformer import Transformer


@torch.inference_mode()
def generate(
    model: Transformer, prompt_token_ids: Sequence[int], params: SamplingParams, *, eos_token_ids: Sequence[int]
) -> list[int]:
    """Completion token ids, the ending token included. Stop strings are text's business and not handled here.

    What the request says of single tokens may leave none; the completion ends there.

    Raises:
        ValueError: the prompt is empty or leaves no room in the context.
    """
    limit = min(len(prompt_token_ids) + params.max_tokens, model.config.max_context_length)
    if not 0 < len(prompt_token_ids) <= limit:
        raise ValueError(f"{len(prompt_token_ids)} prompt tokens, context {model.config.max_context_length}")
    token_ids = list(prompt_token_ids)
    device = model.token_embedding.weight.device
    ends = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}
    while len(token_ids) < limit:
        metadata = AttentionMetadata.uncached((len(token_ids),), device)
        logits_TV = model(torch.tensor(token_ids, device=device), metadata, None)
        completion = token_ids[len(prompt_token_ids) :]
        forbidden = sorted(ends) if len(completion) < params.min_tokens else []
        rules = TokenRules.of(params, prompt_token_ids, completion)
        if rules is not None:
            forbidden += rules.forbidden
        (next_id,) = sample(logits_TV[-1:], [params], [len(token_ids)], forbidden=[forbidden], rules=[rules])
        if next_id == NO_TOKEN:
            break
        token_ids.append(next_id)
        if next_id in ends:
            break
    return token_ids[len(prompt_token_ids) :]
