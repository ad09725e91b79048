"""What a process group is handed suits NCCL too: tensors on the exchange's device, of types that NCCL has.

No GPU is needed: ranks are threads, the process group is one that records and checks, and the device is pretended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

import harts
from harts.data.exchange import ThreadExchange, run_in_threads
from harts.models.tiny import tiny_model
from harts.train import distributed
from harts.train.distributed import ProcessGroupExchange, sum_gradients
from harts.train.ranks import compute_logprobs_across_ranks, train_step_across_ranks
from tests.cases import CASES, trajectories_of
from tests.train.rank_steps import OBJECTIVE, check_exchange

GPU = torch.device("cuda:1")
MOVED = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Types that NCCL has. Of those that PyTorch hands it as another one, bool is not among these, for its sums differ."""


class OnGpu(Tensor):
    """A tensor on the pretended GPU; so is what is computed from it."""

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor)

    def numpy(self, **_: object) -> NDArray:
        raise TypeError("can't convert a CUDA tensor to numpy")


class PretendGpu(TorchFunctionMode):
    """Tensors for the GPU are made on the CPU and marked."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        to_gpu = GPU in (*args[1:], kwargs.get("device"))
        args = (*args[:1], *("cpu" if a == GPU else a for a in args[1:]))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return result.as_subclass(OnGpu) if to_gpu else result


class CheckedGroup:
    """Stands for `torch.distributed`; the group of each rank is its end of the threads' exchange."""

    ReduceOp = dist.ReduceOp

    def __init__(self, backends: str = "cuda:nccl") -> None:
        self.backends, self.calls = backends, set()

    def get_backend_config(self, group: ThreadExchange) -> str:
        return self.backends

    def get_rank(self, group: ThreadExchange) -> int:
        return group.rank

    def get_world_size(self, group: ThreadExchange) -> int:
        return group.ranks

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor, *, group: ThreadExchange) -> None:
        self._check("all_gather", own, *outputs)
        for output, values in zip(
            outputs, group.all_gather(own.cpu().numpy(), [own.numel()] * group.ranks), strict=True
        ):
            output.copy_(torch.from_numpy(values))

    def all_to_all_single(
        self, output: Tensor, own: Tensor, coming: list[int], given: list[int], *, group: ThreadExchange
    ) -> None:
        self._check("all_to_all", own, output)
        assert sum(coming) == output.numel() and sum(given) == own.numel()
        assert all(type(size) is int for size in (*coming, *given))
        parts = group.all_to_all(np.split(own.cpu().numpy(), np.cumsum(given)[:-1]), coming)
        output.copy_(torch.from_numpy(np.concatenate(parts)))

    def all_reduce(self, tensor: Tensor, op: object = None, *, group: ThreadExchange) -> None:
        assert op == dist.ReduceOp.MAX, "gradients are not summed here"
        self._check("all_reduce", tensor)
        tensor.copy_(torch.from_numpy(group.maximum(tensor.cpu().numpy())))

    def _check(self, call: str, *tensors: Tensor) -> None:
        assert all(isinstance(tensor, OnGpu) for tensor in tensors), f"{call} of tensors that are not on the GPU"
        assert all(tensor.dtype in MOVED and tensor.is_contiguous() for tensor in tensors)
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.calls.add(call)


class GpuExchange(ProcessGroupExchange):
    """Pretends inside its calls only, so that the model runs as ever."""

    def all_gather(self, values: NDArray, sizes: Sequence[int]) -> list[NDArray]:
        with PretendGpu():
            return super().all_gather(values, sizes)

    def all_to_all(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        with PretendGpu():
            return super().all_to_all(parts, sizes)

    def maximum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        with PretendGpu():
            return super().maximum(values)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> CheckedGroup:
    checked = CheckedGroup()
    monkeypatch.setattr(distributed, "dist", checked)
    return checked


def test_a_step_hands_over_what_nccl_takes(group: CheckedGroup):
    trajectories = trajectories_of(next(case for case in CASES if case.name == "worked_example"))
    models = [harts.prepare(tiny_model("qwen3_5_text")) for _ in range(3)]

    def work(threads: ThreadExchange) -> None:
        exchange = GpuExchange(threads, device=GPU)  # type: ignore[arg-type]
        model, own = models[exchange.rank], trajectories[exchange.rank :: 3]
        result = train_step_across_ranks(model, own, OBJECTIVE, exchange)
        assert np.array_equal(compute_logprobs_across_ranks(model, own, exchange), result.logprobs_P)

    run_in_threads(3, work)
    assert group.calls == {"all_gather", "all_to_all", "all_reduce"}


@pytest.mark.parametrize("kind", [bool, np.int16, np.uint16, np.uint64, np.float16])
def test_types_that_backends_lack_arrive_too(group: CheckedGroup, kind: type):
    def work(threads: ThreadExchange) -> tuple[list[NDArray], list[NDArray]]:
        exchange = GpuExchange(threads, device=GPU)  # type: ignore[arg-type]
        check_exchange(exchange)
        values = np.arange(exchange.rank + 1).astype(kind)
        parts = [values[:other] for other in range(2)]
        return exchange.all_gather(values, [1, 2]), exchange.all_to_all(parts, [exchange.rank] * 2)

    for rank, (gathered, swapped) in enumerate(run_in_threads(2, work)):
        assert all(array.dtype == kind for array in (*gathered, *swapped))
        assert [a.tolist() for a in gathered] == [[0], [0, 1]]
        assert [a.tolist() for a in swapped] == [[0][:rank], [0][:rank]]


@pytest.mark.parametrize(("backends", "device"), [("cuda:nccl", "cpu"), ("cpu:gloo", "cuda")])
def test_a_device_that_the_group_does_not_reach_is_refused(group: CheckedGroup, backends: str, device: str):
    group.backends = backends
    with pytest.raises(ValueError, match=f"got device '{device}', but its process group communicates from"):
        ProcessGroupExchange(device=device)


def test_gradients_are_summed_where_they_are_as_what_they_are(monkeypatch: pytest.MonkeyPatch):
    """Whether there is a gradient is told as a number: NCCL has no largest of booleans. Those that lie in pieces go
    through a copy, which a large one alone does not need."""
    handed: list[Tensor] = []

    class Doubling(CheckedGroup):
        def all_reduce(self, tensor: Tensor, op: object = None, *, group: object) -> None:
            assert tensor.is_contiguous() and tensor.dtype in MOVED
            handed.append(tensor)
            if op is None:
                tensor.mul_(2)

    monkeypatch.setattr(distributed, "dist", Doubling())
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 40)
    kinds = [(2, torch.float32), (3, torch.float32), (20, torch.float32), (4, torch.bfloat16)]
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=kind)) for size, kind in kinds]
    parameters.append(torch.nn.Parameter(torch.ones(3, 2).T))
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    sum_gradients(parameters)
    for number, parameter in enumerate(parameters):
        assert parameter.grad is not None and (parameter.grad == 2 * (number + 1)).all()
    assert [(t.dtype, t.numel()) for t in handed] == [
        (torch.int32, 5),
        (torch.float32, 5),
        (torch.float32, 20),
        (torch.bfloat16, 4),
        (torch.float32, 6),
    ]
    assert handed[2] is parameters[2].grad
