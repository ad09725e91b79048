"""What surrounds linear attention: kernels against the bytes they must move, and what PyTorch takes for the same.

python -m benchmarks.layers rows

Lightning attention's activation, Kimi Delta Attention's gate, the gated norm after the delta rule, and Mamba2's steps
and skip term, which read packed tokens and write rows of the run order or the other way; and Mamba2's gated norm, whose
kernel is fla's. 32,768 distinct tokens of 4,096 channels (three times as many for the activation), bfloat16; decays and
Mamba2's outputs are float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from fla.modules.norm.layernorm_gated import rmsnorm_fn  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from benchmarks.layers import linear_trees as trees
from benchmarks.layers.timing import Row, check, copy_bandwidth, give_up_after, milliseconds, report
from harts.layers.linear_attention.inputs import DecayGate, GatedNorm
from harts.layers.linear_attention.kernels import mamba2_rows
from harts.layers.linear_attention.kernels.activated_rows import activated_rows
from harts.layers.linear_attention.kernels.decay_rows import decay_rows
from harts.layers.linear_attention.kernels.gated_norm import normed_outputs
from harts.layers.rows import copy_rows, owned_rows, take_rows
from harts.layout.conv_index import RowIndex, row_index
from harts.layout.launch import plan_launch
from harts.tree.prefix_tree import PrefixTree

CHUNK_SIZE = 64
CHANNELS = 4096
HEADS, MAMBA2_HEADS, GROUPS = 32, 64, 8
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Execution:
    """One way to do it."""

    forward: Callable[[], Tensors]
    """What it gives."""
    backward: Callable[[], Tensors]
    """Gradients; after `forward` has run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """Something to do, both ways."""

    name: str
    kernel: Execution
    pytorch: Execution
    forward_bytes: int
    """That must be read and written."""
    backward_bytes: int
    """The same."""


def main(arguments: list[str]) -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers rows", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--tokens", type=int, default=32_768, help="distinct tokens of a tree")
    options = parser.parse_args(arguments)
    give_up_after(300)
    rows: list[Row] = []
    bandwidth = copy_bandwidth()
    for name, make, rounds in (("chain", trees.chain, 128), ("caterpillar", trees.caterpillar, 32)):
        rows += times(name, make(options.tokens, rounds, CHUNK_SIZE), bandwidth)
    report("rows", rows, as_json=options.json)


def times(tree_name: str, tree: PrefixTree, bandwidth: float) -> Iterator[Row]:
    """A row a task and way."""
    index = row_index(tree.num_tokens, plan_launch(tree, CHUNK_SIZE)).to(torch.device("cuda"))
    for make in (activation, gate, gated_norm, steps_and_skip, group_norm):
        task = make(index)
        both = [(*way.forward(), *way.backward()) for way in (task.pytorch, task.kernel)]
        for expected, actual in zip(*both, strict=True):
            check(task.name, expected.float(), actual, at_most=6e-3)
        for path, way in (("kernel", task.kernel), ("PyTorch", task.pytorch)):
            yield {
                "tree": tree_name,
                "what": task.name,
                "path": path,
                "rows": index.num_rows,
                "forward ms": milliseconds(way.forward),
                "forward floor ms": task.forward_bytes / bandwidth * 1e3,
                "backward ms": milliseconds(way.backward),
                "backward floor ms": task.backward_bytes / bandwidth * 1e3,
            }


def normal(*shape: int) -> Tensor:
    """Of bfloat16, with a gradient."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def by_autograd(run: Callable[[], Tensors], leaves: Tensors) -> Execution:
    """Both passes of a function."""
    outputs = run()
    upstream = [torch.randn_like(fixed(output)) for output in outputs]
    return Execution(forward=run, backward=lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True))


def fixed(output: Tensor) -> Tensor:
    """The output, with the generator set, so that both ways get the same gradient from above."""
    torch.manual_seed(output.numel())
    return output


def activation(index: RowIndex) -> Task:
    """Queries, keys and values of lightning attention."""
    mixed, bytes_a_row = normal(index.num_tokens, HEADS, 3 * CHANNELS // HEADS), 6 * CHANNELS
    tokens, rows = index.num_tokens, index.num_rows

    def pytorch() -> Tensors:
        taken = take_rows(torch.nn.functional.silu(mixed), index)
        return tuple(piece.contiguous() for piece in taken.chunk(3, dim=-1))

    return Task(
        name="activation",
        kernel=by_autograd(lambda: activated_rows(mixed, index, "silu"), (mixed,)),
        pytorch=by_autograd(pytorch, (mixed,)),
        forward_bytes=(tokens + rows) * bytes_a_row,
        backward_bytes=(2 * tokens + rows) * bytes_a_row,
    )


def gate(index: RowIndex) -> Task:
    """Decays of Kimi Delta Attention, in PyTorch as transformers' Kimi Linear computes them."""
    projected = normal(index.num_tokens, CHANNELS)
    log_rate, bias = (torch.randn(size, device="cuda").requires_grad_() for size in (HEADS, CHANNELS))
    whole = DecayGate(projected_TD=projected, log_rate_H=log_rate, bias_D=bias, lower_bound=None, dtype=torch.float32)
    tokens, rows = index.num_tokens, index.num_rows

    def pytorch() -> Tensors:
        x = (projected.float() + bias).unflatten(-1, (HEADS, -1))
        softplus = torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))
        return (take_rows(-log_rate.exp()[:, None] * softplus, index),)

    return Task(
        name="gate",
        kernel=by_autograd(lambda: (decay_rows(whole, index),), (projected, log_rate, bias)),
        pytorch=by_autograd(pytorch, (projected, log_rate, bias)),
        forward_bytes=CHANNELS * (2 * tokens + 4 * rows),
        backward_bytes=CHANNELS * (4 * tokens + 4 * rows),
    )


def gated_norm(index: RowIndex) -> Task:
    """Of the outputs of a delta rule, in PyTorch as transformers' Qwen3.5 computes it."""
    tokens, rows, width = index.num_tokens, index.num_rows, CHANNELS // HEADS
    output, gate = normal(rows, HEADS, width), normal(tokens, HEADS, width)
    module = Qwen3_5RMSNormGated(width).to("cuda", torch.bfloat16)
    norm, leaves = GatedNorm(module=module, gate_THV=gate, rounded=True), (output, gate, module.weight)
    return Task(
        name="gated norm",
        kernel=by_autograd(lambda: (normed_outputs(output, norm, index),), leaves),
        pytorch=by_autograd(lambda: (module(owned_rows(output, index), gate),), leaves),
        forward_bytes=CHANNELS * 6 * tokens,
        backward_bytes=CHANNELS * (8 * tokens + 2 * rows),
    )


def steps_and_skip(index: RowIndex) -> Task:
    """Mamba2 before and after SSD, whose own output and gradient are random here."""
    tokens, rows, width = index.num_tokens, index.num_rows, CHANNELS // MAMBA2_HEADS
    x, output = normal(rows, MAMBA2_HEADS, width), normal(rows, MAMBA2_HEADS, width)
    step = torch.rand(rows, MAMBA2_HEADS, device="cuda").requires_grad_()
    skip = torch.randn(MAMBA2_HEADS, device="cuda").requires_grad_()

    def pytorch() -> Tensors:
        value = (x.float() * step.unsqueeze(-1)).to(x.dtype)
        return value, owned_rows(output.float() + skip.unsqueeze(-1) * x, index)

    way = by_autograd(pytorch, (x, step, skip, output))
    dvalue, upstream = (torch.randn_like(fixed(given)) for given in way.forward())
    plain = [leaf.detach() for leaf in (x, step, skip, output)]

    def forward() -> Tensors:
        x, step, skip, output = plain
        return (
            mamba2_rows.times_steps(x, step),
            mamba2_rows.outputs_at_tokens(output, x, skip, index.owner_T),
        )  # fmt: skip

    def backward() -> Tensors:
        x, step, skip, _ = plain
        dout = copy_rows(upstream, index.owned_token_R, dtype=x.dtype)
        return *mamba2_rows.input_gradients(dvalue, dout, x, step, skip), dout

    return Task(
        name="steps and skip",
        kernel=Execution(forward=forward, backward=backward),
        pytorch=way,
        forward_bytes=CHANNELS * (4 * rows + 8 * tokens),
        backward_bytes=CHANNELS * (4 * tokens + 10 * rows),
    )


def group_norm(index: RowIndex) -> Task:
    """Of Mamba2's outputs, which are float32."""
    tokens, gate = index.num_tokens, normal(index.num_tokens, CHANNELS)
    output = torch.randn(tokens, CHANNELS, device="cuda").requires_grad_()
    module = Zamba2RMSNormGated(CHANNELS, CHANNELS // GROUPS).to("cuda", torch.bfloat16)
    leaves = (output, gate, module.weight)

    def kernel() -> Tensors:
        how = {"eps": module.variance_epsilon, "group_size": module.group_size, "norm_before_gate": False}
        return (rmsnorm_fn(output, module.weight, None, z=gate, **how).bfloat16(),)

    return Task(
        name="norm of Mamba2",
        kernel=by_autograd(kernel, leaves),
        pytorch=by_autograd(lambda: (module(output, gate).bfloat16(),), leaves),
        forward_bytes=CHANNELS * 8 * tokens,
        backward_bytes=CHANNELS * 14 * tokens,
    )
