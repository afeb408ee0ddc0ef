"""The op table: every floating-point operation of a training step, one implementation a vendor.

Contract of every op in `layout` mode, whatever the implementation:

* **Row-invariant.** A row of the result depends only on that row of the inputs (and on its own sample for
  attention), never on how many other rows there are.
* **Split-invariant.** Splitting N of a GEMM, the heads of attention or the rows of a weight gives the same
  bits as slicing the unsplit result.
* **Fixed K order.** Each output element accumulates in fp32 over K in an order that depends on K alone.
* **From zero.** Accumulators start at +0, so that adding an exact zero later never changes a bit.
* Activations are `dt` = fp32 or bf16. With bf16, products are of bf16 operands, sums are fp32, and there is
  one rounding, at the result.

Letters: T packed tokens, M rows, K/N GEMM dims, L leaves on this rank, W leaves in all, H hidden size,
h heads, d head dim. "Nodes" are the maximal complete subtrees of the canonical tree (comm/tree.py) over this
rank's leaves [first, first + L) of W; there is one node when the range is aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unirl_scale.kernels.spans import Spans

SAMPLE_SCALE = 2.0**40  # units of a likelihood of 1; sums over 2^22 tokens stay exact in int64

# A node is the half-open range of *local* leaf indices it sums, e.g. ((0, 2), (2, 3)).
Nodes = Sequence[tuple[int, int]]


class OpTable(Protocol):
    """Arithmetic of one vendor. Raises ShapeError for a shape or dtype an op does not take."""

    name: str

    # ---- GEMM -------------------------------------------------------------------------------------
    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_fp32: bool = False) -> Tensor:
        """Column-parallel forward. x [M, K] dt, w [L, n, K] dt, bias [L, n] dt -> [M, L*n] dt (fp32 if
        asked: the logits); slice l is x @ w[l].T + bias[l]. Bias is added in fp32 before the one rounding."""
        ...

    def linear_dx_nodes(self, dy: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        """Column-parallel dX. dy [M, L*n] dt, w [L, n, K] dt -> fp32 [len(nodes), M, K]. Leaf l is
        dy[:, l*n:(l+1)*n] @ w[l]; a node adds its leaves by the canonical tree. round_leaf rounds each
        leaf to bf16 first (`invariance.leaf_dtype: bf16`)."""
        ...

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        """Row-parallel forward. x [M, L*k] dt, w [L, N, k] dt -> fp32 [len(nodes), M, N]. Leaf l is
        x[:, l*k:(l+1)*k] @ w[l].T."""
        ...

    def row_linear_dx(self, dy: Tensor, w: Tensor) -> Tensor:
        """Row-parallel dX. dy [M, N] dt, w [L, N, k] dt -> [M, L*k] dt; slice l is dy @ w[l]."""
        ...

    def linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        """Column-parallel dW. dy [T, L*n] dt, x [T, K] dt, out fp32 [L, n, K]; for each sample s of spans,
        in order: out[l] = out[l] + dy_s[:, l].T @ x_s, the product accumulated over the sample's tokens in
        order from zero and then added. A sample with zero rows adds nothing."""
        ...

    def row_linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        """Row-parallel dW. dy [T, N] dt, x [T, L*k] dt, out fp32 [L, N, k]; slice l adds dy_s.T @ x_s[:,
        l]."""
        ...

    # ---- sums -------------------------------------------------------------------------------------
    def tree_sum(self, leaves: Tensor) -> Tensor:
        """fp32 [n, ...] -> [...]: the canonical tree over dim 0, n >= 1."""
        ...

    def sum_tokens(self, x: Tensor, spans: Spans, out: Tensor) -> None:
        """Bias gradient. x [T, N]; for each sample in order: out[N] (fp32) += tree over its tokens."""
        ...

    # ---- pointwise, norm, rope --------------------------------------------------------------------
    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x [..., H] dt, w [H] fp32 or dt -> (y dt, rstd fp32 [...]): y = x * rstd * w, in fp32, rounded
        once."""
        ...

    def rmsnorm_dx(
        self, dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """dy [..., H] dt, or the fp32 root of a sum, rounded to dt first -> (dx dt [..., H], per-row weight
        gradient dy * x * rstd, fp32 [..., H]). With a residual [..., H] dt: residual + dx, dx rounded
        before."""
        ...

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """Residual connection. x [..., H] dt, delta [..., H] dt, or the fp32 root of a sum, rounded to dt
        first -> x + delta, dt."""
        ...

    def add_rmsnorm(self, x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """y = `add(x, delta)` and its `rmsnorm` -> (y, normed, rstd)."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate halves. x [T, h, d] dt, cos/sin fp32 [T, d/2] of each token's position -> [T, h, d] dt."""
        ...

    def rope_to_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Decode: `rope` of q is returned, `rope` of k and v itself go to the cache.

        Args:
            q: [B, h, d] dt. k, v: [B, hk, d] dt. Views with contiguous d.
            cos, sin: fp32 [B, d/2].
            k_pages, v_pages: [P, page, hk, d] dt.
            slots: int64 [B], rows counted over all pages.
        """
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, L, 2, f] dt -> silu(gate) * up, [T, L, f] dt; fp32 inside, one rounding."""
        ...

    def swiglu_dx(self, dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """[T, L, f], [T, L, 2, f] -> (gradient [T, L, 2, f] dt, `swiglu(gate_up)` again: it is cheaper to
        compute here than to keep)."""
        ...

    # ---- attention --------------------------------------------------------------------------------
    def attention(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        """Causal, variable length. q [T, h, d], k/v [T, hk, d] dt, query head i reads kv head i // (h/hk)
        -> (o [T, h, d] dt, lse fp32 [T, h]). KV blocks have one size and start at the sample's position 0."""
        ...

    def attention_dx(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (dq, dk, dv) dt; dk, dv sum the query heads of their group in head order. No atomics."""
        ...

    def attention_decode(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> Tensor:
        """One new token a sample against a paged cache; the bits of `attention`'s row at that position.

        Args:
            q: [B, h, d] dt.
            k_pages, v_pages: [P, page, hk, d] dt; hold the new token's k and v already. `page` is a multiple
                or a divisor of the table's KV tile.
            block_table: int32 [B, N]; position p of sample b is row p % page of page block_table[b, p //
                page]. Entries and rows at or past a sample's length are never read.
            lengths: int64 [B], positions of each sample, the new one included; at least 1.

        Returns:
            [B, h, d] dt.

        Raises:
            ShapeError: also for a page size that cuts a tile.
        """
        ...

    # ---- vocabulary -------------------------------------------------------------------------------
    def vocab_stats(
        self, logits: Tensor, leaves: int, valid: Sequence[int], targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Partial log-softmax of this rank's vocabulary leaves.

        Args:
            logits: fp32 [T, L*v], already divided by the temperature.
            valid: real (unpadded) columns of each local leaf.
            targets: int64 [T], column on this rank, or -1 when the target lives elsewhere.

        Returns:
            stats fp32 [T, L, 3]: m = max, s = sum exp(x - m), u = sum exp(x - m) * (x - m) of each leaf
            (a leaf with no valid column: -inf, 0, 0); target logit fp32 [T] (0 when elsewhere).
        """
        ...

    def vocab_dlogits(
        self,
        logits: Tensor,
        leaves: int,
        valid: Sequence[int],
        targets: Tensor,
        lse: Tensor,
        entropy: Tensor,
        grad_logprob: Tensor,
        grad_entropy: Tensor,
        *,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Gradient of sum(grad_logprob * logprob + grad_entropy * entropy) w.r.t. logits / scale, [T, L*v]:
        p = exp(x - lse); grad_logprob * (1[target] - p) - grad_entropy * p * (x - lse + entropy), times
        scale, in fp32, rounded once to `dtype`; padded columns get 0."""
        ...

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """One token a row, drawn by integers, so that sums are exact in any order.

        With w = floor(exp(x - max x) * SAMPLE_SCALE) and t = floor(u * sum w), at most sum w - 1: the first
        token at which the running sum of w passes t.

        Args:
            logits: fp32 [B, V], a finite one in every row; -inf excludes a token. Rows are contiguous.
            uniforms: fp64 [B] in [0, 1).

        Returns:
            int64 [B].
        """
        ...

    def embedding_dw(self, dy: Tensor, ids: Tensor, out: Tensor) -> None:
        """dy [T, H], ids int64 [T] (row of out, or -1 to skip), out fp32 [rows, H]; for each token in packed
        order: out[ids[t]] += dy[t]. Tokens are in (sample, position) order."""
        ...

    # ---- optimizer --------------------------------------------------------------------------------
    def block_sumsq(self, blocks: Tensor) -> Tensor:
        """fp32 [n, BLOCK] -> fp64 [n]: sum of squares of each block, fp32 canonical tree inside."""
        ...

    def adamw(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction1: float,
        bias_correction2: float,
        grad_scale: float,
    ) -> None:
        """One AdamW step in place on flat fp32 tensors; element i depends on element i alone.
        g = grad * grad_scale; m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g;
        p = p - lr*wd*p; p = p - lr * (m/bc1) / (sqrt(v/bc2) + eps). Every product and sum rounds
        separately."""
        ...
