"""Loss aggregation by *global* counts, as a weight for every token.

Once the weights exist, the loss is `sum(weights * token_loss)` however the minibatch is cut into
micro-batches or spread over ranks; a mean of means cannot creep in.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(mask: Tensor, aggregation: Aggregation, max_length: int = 0) -> Tensor:
    """Weight of every token of one whole minibatch.

    With N kept tokens in all, R rows that have one, and n_i in row i:
    token-mean 1/N; seq-mean-token-sum 1/R; seq-mean-token-mean 1/(R n_i); seq-mean-token-sum-norm
    1/(R max_length). An empty row is not in R. Counts are Python ints and each weight is rounded once.

    Args:
        mask: bool [n, S].
        max_length: the constant length of seq-mean-token-sum-norm, in tokens (Dr.GRPO, Liu et al. 2025).

    Returns:
        fp32 [n, S], +0 where masked; all zero when nothing is kept.
    """
    per_row = [int(count) for count in mask.sum(dim=1).tolist()]
    tokens, rows = sum(per_row), sum(count > 0 for count in per_row)
    if aggregation == "token-mean":
        denominators = [tokens for _ in per_row]
    elif aggregation == "seq-mean-token-sum":
        denominators = [rows for _ in per_row]
    elif aggregation == "seq-mean-token-mean":
        denominators = [rows * count for count in per_row]
    else:
        denominators = [rows * max_length for _ in per_row]
    scale = [1.0 / d if d else 0.0 for d in denominators]
    column = torch.tensor(scale, dtype=torch.float64, device=mask.device).to(torch.float32)
    return torch.where(mask, column[:, None], 0.0)
