"""Token masks applied to logits: tokens that a grammar does not allow get -inf.

Legend: B sequences, R rows with a mask, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def mask_logits(logits_BV: Tensor, rows: Sequence[int], allowed_RV: Tensor) -> Tensor:
    """Return a copy of the logits with -inf in these rows wherever `allowed_RV` (bool) is false.

    Raises:
        ValueError: the shapes disagree.
    """
    if allowed_RV.shape != (len(rows), logits_BV.shape[1]):
        raise ValueError(f"masks of {tuple(allowed_RV.shape)} for {len(rows)} rows of {logits_BV.shape[1]}")
    allowed_RV = allowed_RV.to(logits_BV.device, non_blocking=True)
    if len(rows) == len(logits_BV):  # rows are distinct and in order, so these are all rows
        return logits_BV.masked_fill(~allowed_RV, -torch.inf)
    rows_R = torch.tensor(rows, device=logits_BV.device)
    return logits_BV.index_copy(0, rows_R, logits_BV[rows_R].masked_fill(~allowed_RV, -torch.inf))
