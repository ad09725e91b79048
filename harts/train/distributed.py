"""The only file that knows `torch.distributed`: ranks exchange arrays, and sum gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from harts.data.ragged import split

BUCKET_BYTES = 64 * 2**20
"""Gradients that are summed at a time."""


class ProcessGroupExchange:
    """This rank's end of a process group, as `harts.data.exchange.Exchange`.

    Arrays are gathered and sent as bytes, since backends differ in the types that they know.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> exchange = ProcessGroupExchange()  # doctest: +SKIP
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: str | torch.device = "cpu") -> None:
        """Take part in a group.

        Args:
            group: Of the data-parallel ranks; None for all processes.
            device: Where the backend communicates from: "cpu" for gloo; this rank's GPU for NCCL, "cuda" being the one
                that `torch.cuda.set_device` chose.

        Raises:
            ValueError: If the group does not communicate from such a device.
        """
        self._group, self._device = group, torch.device(device)
        known = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
        if self._device.type not in known:
            raise ValueError(
                f"The exchange got device {str(self._device)!r}, but its process group communicates from {known}. Pass "
                'one of these as device=, such as "cuda" for NCCL.'
            )

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
        largest = max(sizes)
        if largest == 0:
            return [values[:0]] * len(sizes)
        padded = np.zeros(largest, dtype=values.dtype)
        padded[: values.size] = values
        own = self._to_device(padded.view(np.uint8))
        gathered = torch.empty(len(sizes), own.numel(), dtype=torch.uint8, device=self._device)
        dist.all_gather(list(gathered), own, group=self._group)
        by_rank = gathered.cpu().numpy().view(values.dtype)
        return [row[:size] for row, size in zip(by_rank, sizes, strict=True)]

    def all_to_all(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`."""
        joined = np.concatenate(parts)
        given, coming = ([size * joined.itemsize for size in some] for some in ([p.size for p in parts], sizes))
        sent = self._to_device(joined.view(np.uint8))
        received = torch.empty(sum(coming), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, sent, coming, given, group=self._group)
        return split(received.cpu().numpy().view(joined.dtype), np.array(sizes, dtype=np.int64))

    def maximum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """As documented on `Exchange`."""
        tensor = self._to_device(values.copy())
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor.cpu().numpy()

    def _to_device(self, values: NDArray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


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
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)  # the largest are not copied
            continue
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
