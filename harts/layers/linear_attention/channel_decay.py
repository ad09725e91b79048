"""Products of a chunk's tokens under a decay that every key channel has of its own.

A decay shared by all channels factors out of the inner product; one per channel does not, and its pairwise form takes
[C, C, K] numbers a chunk. Splitting it as `exp(decay_i) * exp(-decay_j)` overflows. So chunks are cut into sub-chunks:
between two of them the decay is split at the start of the later one, where both factors are at most 1 however strong
the decay is; only inside a sub-chunk is it pairwise (Gated Linear Attention, arXiv 2312.06635, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SUB_CHUNK = 16
"""Tokens of a sub-chunk: longer ones need more memory, shorter ones more calls."""


def decayed_products(left: Tensor, key: Tensor, decay: Tensor) -> Tensor:
    """`out[m, i, j] = sum_k left[m, i, k] * key[j, k] * exp(decay[i, k] - decay[j, k])` for `j <= i`, 0 above.

    The backward pass forms the pairwise decays again instead of keeping them.

    Args:
        left: [G, H, M, C, K], M sets of rows to multiply with the same keys.
        key: [G, H, C, K].
        decay: [G, H, C, K]. Summed over the chunk up to and with each token: never rising.

    Returns:
        [G, H, M, C, C].
    """
    return _DecayedProducts.apply(left, key, decay)


class _DecayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, key: Tensor, decay: Tensor) -> Tensor:
        ctx.save_for_backward(left, key, decay)
        out = left.new_zeros(*left.shape[:-1], key.shape[-2])
        for rows, before in _sub_chunks(key.shape[-2]):
            part = _Decays.of(decay, rows, before)
            left_MIK = (left[..., rows, :] * part.row.unsqueeze(2)).flatten(2, 3)
            products = left_MIK @ (key[..., before, :] * part.before).transpose(-1, -2)
            out[..., rows, before] = products.unflatten(2, (left.shape[2], -1))
            # [G, H, I, J, K] @ [G, H, I, K, M]
            inside = (key[..., None, rows, :] * part.inside) @ left[..., rows, :].permute(0, 1, 3, 4, 2)
            out[..., rows, rows] = inside.permute(0, 1, 4, 2, 3)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grad_outputs
        left, key, decay = ctx.saved_tensors
        grad_left, grad_key = torch.empty_like(left), torch.zeros_like(key)
        for rows, before in _sub_chunks(key.shape[-2]):
            part = _Decays.of(decay, rows, before)
            grad_before = grad[..., rows, before].flatten(2, 3)
            left_MIK = (left[..., rows, :] * part.row.unsqueeze(2)).flatten(2, 3)
            from_before = (grad_before @ (key[..., before, :] * part.before)).unflatten(2, (left.shape[2], -1))
            grad_key[..., before, :] += (grad_before.transpose(-1, -2) @ left_MIK) * part.before

            grad_IJM = grad[..., rows, rows].permute(0, 1, 3, 4, 2)
            from_inside = (key[..., None, rows, :] * part.inside).transpose(-1, -2) @ grad_IJM
            grad_left[..., rows, :] = from_before * part.row.unsqueeze(2) + from_inside.permute(0, 1, 4, 2, 3)
            left_IMK = left[..., rows, :].transpose(2, 3)
            grad_key[..., rows, :] += (part.inside * (grad_IJM @ left_IMK)).sum(-3)
        # A token's decay scales what it reads and, inversely, what it wrote.
        return grad_left, grad_key, (left * grad_left).sum(2) - key * grad_key


def _sub_chunks(length: int) -> list[tuple[slice, slice]]:
    """The tokens of every sub-chunk, and those before it."""
    return [(slice(i, min(i + SUB_CHUNK, length)), slice(0, i)) for i in range(0, length, SUB_CHUNK)]


@dataclass(frozen=True, slots=True, eq=False)
class _Decays:
    """Decays that end in one sub-chunk, all of them exponentials of numbers <= 0."""

    row: Tensor
    """[G, H, I, K]. From the first token of the sub-chunk to each of its tokens."""
    before: Tensor
    """[G, H, J, K]. From each token before the sub-chunk to its first."""
    inside: Tensor
    """[G, H, I, J, K]. From token J of the sub-chunk to token I, 0 for later J."""

    @classmethod
    def of(cls, decay: Tensor, rows: slice, before: slice) -> _Decays:
        own = decay[..., rows, :]
        first = own[..., :1, :]
        length = own.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1).unsqueeze(-1)
        pairwise = own.unsqueeze(-2) - own.unsqueeze(-3)
        return cls(
            row=(own - first).exp(),
            before=(first - decay[..., before, :]).exp(),
            inside=pairwise.masked_fill(later, float("-inf")).exp(),
        )
