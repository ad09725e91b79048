"""The only file that knows `torch.distributed`: ranks exchange arrays, and sum gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Gradients that are summed at a time."""


class ProcessGroupExchange:
    """This rank's end of a process group, as `harts.data.exchange.Exchange`.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> exchange = ProcessGroupExchange()  # doctest: +SKIP
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: str | torch.device = "cpu") -> None:
        """Take part in a group.

        Args:
            group: Of the data-parallel ranks; None for all processes.
            device: Where the backend communicates from: "cpu" for gloo, this rank's GPU for NCCL.
        """
        self._group, self._device = group, torch.device(device)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self._group)

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return dist.get_world_size(self._group)

    def all_gather(self, values: NDArray, sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`; pads to the largest."""
        own = torch.zeros(max(sizes), dtype=_torch_type(values), device=self._device)
        own[: values.size] = self._tensor(values)
        gathered = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(gathered, own, group=self._group)
        return [tensor[:size].cpu().numpy() for tensor, size in zip(gathered, sizes, strict=True)]

    def all_to_all(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`."""
        sent = self._tensor(np.concatenate(parts))
        received = torch.empty(sum(sizes), dtype=sent.dtype, device=self._device)
        dist.all_to_all_single(received, sent, list(sizes), [part.size for part in parts], group=self._group)
        return [tensor.cpu().numpy() for tensor in received.split(list(sizes))]

    def maximum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """As documented on `Exchange`."""
        tensor = self._tensor(values.copy())
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor.cpu().numpy()

    def _tensor(self, values: NDArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of all ranks, in place.

    Loss weights are those of the whole step, so sums, not means, are its gradients. Where a parameter has a gradient on
    some ranks only, the others count as zero; where it has none on any, it stays None.

    Args:
        parameters: In the same order on all ranks. Not for parameters that are sharded: those reduce their own.
        group: Of the data-parallel ranks; None for all processes.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    gradients: list[Tensor] = []
    for parameter, exists in zip(trained, present.tolist(), strict=True):
        if exists:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Gradients of one type and device, as many at a time as `BUCKET_BYTES` hold, but at least one."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        fits = size + gradient.nbytes <= BUCKET_BYTES
        if bucket and not (fits and (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def _torch_type(values: NDArray) -> torch.dtype:
    return torch.from_numpy(values[:0].copy()).dtype
