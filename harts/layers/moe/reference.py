"""The definitions: every trajectory's tokens as they are when it is trained alone, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harts.layers.moe.losses import Balance
from harts.layers.moe.scores import Scores, probabilities

Routed = Sequence[tuple[Tensor, Tensor]]
"""Of one trajectory, a layer each: logits [L, X] and the chosen experts [L, A]."""


def loads(trajectories: Sequence[Routed], counts: Sequence[float]) -> Tensor:
    """[M, X] float64. Tokens that each layer sent to each expert."""
    num_experts = trajectories[0][0][0].shape[1]
    total_MX = torch.zeros(len(trajectories[0]), num_experts, dtype=torch.float64)
    for routed, count in zip(trajectories, counts, strict=True):
        for layer, (_, expert_LA) in enumerate(routed):
            total_MX[layer] += count * torch.bincount(expert_LA.reshape(-1), minlength=num_experts)
    return total_MX


def balance_loss(
    microbatches: Sequence[Sequence[Routed]],
    counts: Sequence[Sequence[float]],
    balance: Balance,
    scores: Scores,
) -> Tensor:
    """The load-balancing loss of a step over its microbatches, before the coefficient."""
    if balance in ("sequence", "step"):
        whole, all_counts = [t for m in microbatches for t in m], [c for m in counts for c in m]
        if balance == "step":
            return _switch(whole, all_counts, scores)
        alone = [c * _switch([t], [1.0], scores) for t, c in zip(whole, all_counts, strict=True)]
        return torch.stack(alone).sum() / sum(all_counts)
    loss_of = _transformers if balance == "microbatch" else _switch
    tokens = [_num_tokens(m, c) for m, c in zip(microbatches, counts, strict=True)]
    losses = [n * loss_of(m, c, scores) for n, m, c in zip(tokens, microbatches, counts, strict=True)]
    return torch.stack(losses).sum() / sum(tokens)


def z_loss(trajectories: Sequence[Routed], counts: Sequence[float]) -> Tensor:
    """Mean over layers and tokens of the squared log-sum-exp."""
    sums = [
        c * logits.logsumexp(-1).square().sum() for t, c in zip(trajectories, counts, strict=True) for logits, _ in t
    ]
    return torch.stack(sums).sum() / (_num_tokens(trajectories, counts) * len(trajectories[0]))


def _num_tokens(trajectories: Sequence[Routed], counts: Sequence[float]) -> float:
    return sum(c * t[0][0].shape[0] for t, c in zip(trajectories, counts, strict=True))


def _switch(trajectories: Sequence[Routed], counts: Sequence[float], scores: Scores) -> Tensor:
    """Experts times the sum of share of slots times mean probability, mean over layers."""
    load_MX, mean_MX, num_experts = _means(trajectories, counts, scores)
    share_MX = load_MX / load_MX.sum(1, keepdim=True)
    return num_experts * (share_MX * mean_MX).sum(1).mean()


def _transformers(trajectories: Sequence[Routed], counts: Sequence[float], scores: Scores) -> Tensor:
    """`load_balancing_loss_func`: rows of all layers together, and slots a row instead of shares of slots."""
    load_MX, mean_MX, num_experts = _means(trajectories, counts, scores)
    num_active = trajectories[0][0][1].shape[1]
    share_X = load_MX.sum(0) / load_MX.sum()
    return num_experts * num_active * (share_X * mean_MX.mean(0)).sum()


def _means(trajectories: Sequence[Routed], counts: Sequence[float], scores: Scores) -> tuple[Tensor, Tensor, int]:
    layers = range(len(trajectories[0]))
    sums = [
        torch.stack([c * probabilities(t[layer][0], scores).sum(0) for layer in layers])
        for t, c in zip(trajectories, counts, strict=True)
    ]
    mean_MX = torch.stack(sums).sum(0) / _num_tokens(trajectories, counts)
    return loads(trajectories, counts), mean_MX, mean_MX.shape[1]
