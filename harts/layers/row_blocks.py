"""One arithmetic for every row, however many rows a call has.

Libraries choose kernels by the sizes of a call: a matrix product of 677 rows may add up in another order than one of
40, a sum over channels splits otherwise when there are few rows, and on a CPU the last elements of a tensor take other
instructions than the rest. So the same token rounds differently in a tree and alone. Here every such operator runs in
blocks of one fixed size, the last one padded with zeros; the kernel is always the same, and a row's place in its block
does not matter to it (`tests/layers/test_row_blocks.py`). The idea is that of batch-invariant kernels (H. He,
"Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 256
"""Of a block of a matrix product."""
MATRICES = 16
"""Of a block of a batch of matrix products."""
CPU_ELEMENTS = 2**14
"""Of a block of an element-wise operator or a reduction; a CPU does not split so few over threads."""
GPU_ELEMENTS = 2**20
"""Of a block of a reduction, where a call costs more."""

aten = torch.ops.aten
Rule = Callable[[Callable[..., Tensor], Sequence[Any], dict[str, Any]], Tensor]


class row_blocks(TorchDispatchMode):  # noqa: N801 - used like a function
    """Run what depends on the number of rows in blocks of one size; enter it around a forward pass.

    Covers matrix products, sums, means and softmaxes over the last axis, and on a CPU the element-wise functions whose
    vector and scalar forms round differently. Does not see kernels that are no operators of PyTorch (Triton,
    FlashAttention), nor grouped matrix products, convolutions, triangular solves and attention: their callers keep
    these independent of the number of rows. The backward pass may run in it, but gradients of weights sum over rows
    in the order they come.

    Example:
        >>> x, weight = torch.randn(5, 64), torch.randn(48, 64)
        >>> with row_blocks():
        ...     torch.equal((x @ weight.T)[:1], x[:1] @ weight.T)
        True
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, in blocks if there is a rule for it."""
        options = dict(kwargs or {})
        function = FUNCTIONAL.get(func)
        if function is not None:
            return options.pop("out").copy_(RULES[function](function, args, options))
        rule = RULES.get(func)
        return func(*args, **options) if rule is None else rule(func, args, options)


def _in_blocks(function: Callable[..., Tensor], *inputs: Tensor, size: int) -> Tensor:
    """`function(*inputs)`, `size` rows of each input at a time."""
    rows = inputs[0].shape[0]
    outputs = []
    for begin in range(0, rows, size):
        taken = min(size, rows - begin)
        # Copied into new memory: kernels are chosen by strides and alignment, too.
        blocks = [x.new_zeros(size, *x.shape[1:]) for x in inputs]
        for block, x in zip(blocks, inputs, strict=True):
            block[:taken] = x[begin : begin + taken]
        outputs.append(function(*blocks)[:taken])
    return torch.cat(outputs) if outputs else function(*inputs)


def _elements(x: Tensor) -> int:
    return CPU_ELEMENTS if x.device.type == "cpu" else GPU_ELEMENTS


def _product(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    left, *rest = args
    return _in_blocks(lambda block: function(block, *rest, **options), left, size=ROWS)


def _product_with_bias(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    bias, left, *rest = args
    if bias.dim() == 2 and bias.shape[0] > 1:
        return _in_blocks(lambda b, block: function(b, block, *rest, **options), bias, left, size=ROWS)
    return _in_blocks(lambda block: function(bias, block, *rest, **options), left, size=ROWS)


def _batched_product(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    left, right, *rest = args
    return _in_blocks(lambda a, b: function(a, b, *rest, **options), left, right, size=MATRICES)


def _batched_product_with_bias(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    bias, left, right, *rest = args
    bias = bias.expand(left.shape[0], left.shape[1], right.shape[2])
    return _in_blocks(lambda c, a, b: function(c, a, b, *rest, **options), bias, left, right, size=MATRICES)


def _reduction(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    """A sum or mean over the last axis; over others it is left alone."""
    x, axes, keep = args[0], args[1] if len(args) > 1 else None, bool(args[2:3] and args[2])
    if axes is None or [axis % x.dim() for axis in axes] != [x.dim() - 1] or x.dim() < 2 or not x.is_floating_point():
        return function(*args, **options)
    rows, size = x.reshape(-1, x.shape[-1]), _rows_of(x)
    total = _in_blocks(lambda block: function(block, [1], False, **options), rows, size=size)
    return total.reshape(*x.shape[:-1], 1) if keep else total.reshape(x.shape[:-1])


def _softmax(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    x, axis, *rest = args
    if x.dim() < 2 or axis % x.dim() != x.dim() - 1:
        return function(*args, **options)
    rows = x.reshape(-1, x.shape[-1])
    return _in_blocks(lambda block: function(block, 1, *rest, **options), rows, size=_rows_of(x)).reshape(x.shape)


def _rows_of(x: Tensor) -> int:
    """Rows of a block of a reduction; one where rows are not aligned alike."""
    width = x.shape[-1]
    aligned = width * x.element_size() % 16 == 0
    return max(1, _elements(x) // max(1, width)) if aligned or x.device.type == "cpu" else 1


def _element_wise(function: Callable[..., Tensor], args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    x, *rest = args
    if x.device.type != "cpu" or not x.is_floating_point():
        return function(*args, **options)
    values = _in_blocks(lambda block: function(block, *rest, **options), x.reshape(-1), size=CPU_ELEMENTS)
    # In the memory order of the input, as the operator itself would give it.
    return torch.empty_like(x, dtype=values.dtype).copy_(values.view(x.shape))


RULES: dict[Callable[..., Any], Rule] = {
    aten.mm.default: _product,
    aten.mm.dtype: _product,
    aten.mv.default: _product,
    aten.addmm.default: _product_with_bias,
    aten.addmm.dtype: _product_with_bias,
    aten.bmm.default: _batched_product,
    aten.bmm.dtype: _batched_product,
    aten.baddbmm.default: _batched_product_with_bias,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    **dict.fromkeys(
        (
            aten.cos.default,
            aten.exp.default,
            aten.exp2.default,
            aten.gelu.default,
            aten.log.default,
            aten.log1p.default,
            aten.pow.Tensor_Scalar,
            aten.rsqrt.default,
            aten.sigmoid.default,
            aten.silu.default,
            aten.sin.default,
            aten.softplus.default,
            aten.tanh.default,
        ),
        _element_wise,
    ),
}
FUNCTIONAL: dict[Callable[..., Any], Callable[..., Tensor]] = {
    aten.mm.out: aten.mm.default,
    aten.mm.dtype_out: aten.mm.dtype,
    aten.addmm.out: aten.addmm.default,
    aten.addmm.dtype_out: aten.addmm.dtype,
    aten.bmm.out: aten.bmm.default,
}
"""Operators that write into a given tensor, and what they write."""
