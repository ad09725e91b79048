"""The per-trajectory oracle, float64 runs of transformers, and comparisons; for tests of HARTS and of its users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from harts.data import Trajectory, TrajectoryBatch
from harts.objective import loss_weights
from harts.objective.streams import Objective, PolicyStreams


class float64_throughout(TorchDispatchMode):  # noqa: N801 - used like a function
    """Lift transformers' inner casts to float32 (norms, gates, rotary tables, softmax, chunk rule) to float64.

    With them, a float64 model is only float32 exact. Enter it around both executions, backward included: it acts on
    operators, so it also reaches the forward that activation checkpointing repeats there.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator with float64 wherever it was asked for float32."""
        if not kwargs:
            return func(*args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to keep the compiler out of every operator costs more than the operator."""
        return False


def one_trajectory_at_a_time(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], objective: Objective
) -> tuple[Tensor, Tensor]:
    """The oracle: every trajectory alone through an unmodified transformers model, full logits, one objective.

    Gradients are added to the model's parameters.

    Args:
        model: Not prepared.
        trajectories: Of one step.
        objective: Sees all of them at once.

    Returns:
        The log-probs of the trained tokens [P], detached, and the loss.
    """
    logprobs_P, loss = forward_one_trajectory_at_a_time(model, trajectories, objective)
    loss.backward()
    return logprobs_P, loss.detach()


def forward_one_trajectory_at_a_time(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], objective: Objective
) -> tuple[Tensor, Tensor]:
    """The oracle without its backward pass.

    Args:
        model: Not prepared.
        trajectories: Of one step.
        objective: Sees all of them at once.

    Returns:
        The log-probs of the trained tokens [P], detached, and the loss with its graph.
    """
    batch = TrajectoryBatch.of(trajectories)
    logprobs, entropies = [], []
    for trajectory in trajectories:
        trained = torch.from_numpy(trajectory.loss_mask).nonzero()[:, 0]
        ids = torch.from_numpy(trajectory.token_ids)
        logits = model(ids[None], use_cache=False).logits[0]
        logits = logits[trained - 1].to(torch.promote_types(logits.dtype, torch.float32))
        log_p = (logits / trajectory.temperature).log_softmax(-1)
        logprobs.append(log_p.gather(1, ids[trained, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    logprobs_P = torch.cat(logprobs)

    def column(values: Any) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(logprobs_P)

    advantages_P, loss_weight_P = column(batch.advantages_P), column(loss_weights(batch, objective.normalization))
    assert advantages_P is not None and loss_weight_P is not None
    output = objective(
        PolicyStreams(
            logprobs_P=logprobs_P,
            entropy_P=torch.cat(entropies),
            sampling_logprobs_P=column(batch.sampling_logprobs_P),
            ref_logprobs_P=column(batch.ref_logprobs_P),
            advantages_P=advantages_P,
            loss_weight_P=loss_weight_P,
            trajectory_P=torch.from_numpy(batch.trajectory_P),
            num_trajectories=batch.num_trajectories,
        )
    )
    return logprobs_P.detach(), output.loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of the trainable parameters, zeros where none arrived."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def assert_close(name: str, expected: Tensor, actual: Tensor, *, ratio: float, scale: float = 0.0) -> None:
    """Fail unless shapes agree, all is finite, and `||actual - expected|| <= ratio * ||expected|| + eps * scale`.

    Args:
        name: What is compared, for the message.
        expected: Any shape.
        actual: The same shape.
        ratio: Relative error granted.
        scale: Size of the numbers that were added up to get there. Its rounding error is granted too, so that a
            gradient that cancels to zero compares with one that cancels to 1e-17.
    """
    assert expected.shape == actual.shape, f"{name}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.isfinite().all(), f"{name} is not finite"
    difference, norm = (actual - expected).norm().item(), expected.norm().item()
    granted = ratio * norm + torch.finfo(expected.dtype).eps * scale
    assert difference <= granted, f"{name}: differs by {difference:.3e} of {norm:.3e}, at most {granted:.3e} expected"


def assert_gradients_close(expected: dict[str, Tensor], actual: dict[str, Tensor], *, ratio: float) -> None:
    """Compare every parameter's gradient; the whole gradient's norm is the scale at which zeros are rounded."""
    assert expected.keys() == actual.keys()
    scale = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert scale > 0, "a comparison of zero gradients shows nothing"
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", gradient, actual[name], ratio=ratio, scale=scale)
