"""FlashAttention-4's kernels for Hopper with the parts of `flash4_parts.py` in place of their own.

The package's classes stay as they are. Subclasses hold copies of the methods that use a part, which see another object
under its name; all of it is made for the version that `flash4.py` checks.
"""

# Installed with the `gpu` extra only.
# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from cutlass import cute
from flash_attn.cute import interface
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from torch import Tensor

from harts.layers.tree_attention import flash4_parts
from harts.layers.tree_attention.flash4_parts import (
    TreeMask,
    load_queries,
    longest_first,
    multiply_queries,
    store_query_gradients,
)


def rebound(function: Callable[..., Any], **names: Any) -> types.FunctionType:
    """A copy of a function to which these global names mean something else.

    Args:
        function: Of the package; of a compiled one, what it was compiled from.
        names: Global names that it reads.
    """
    inner = inspect.unwrap(function)
    missing = [name for name in names if name not in inner.__globals__]
    assert not missing, f"{inner.__qualname__} of another version: its module has no {missing}"
    # A function that was compiled before has other code by now.
    code = vars(inner).get("_original_code", inner.__code__)
    copy = types.FunctionType(code, inner.__globals__ | names, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = inner.__kwdefaults__, inner.__qualname__, inner.__module__
    copy.__annotations__ = inner.__annotations__
    return copy


def _longest_rows_first(base: type[Any]) -> Callable[..., None]:
    """The `__call__` of a kernel of the package, whose work is taken up in the order of its auxiliary tensors."""
    signature = inspect.signature(base.__call__)
    place = list(signature.parameters).index("aux_data") - 1  # behind `self`

    @cute.jit
    def __call__(self, *arguments: Any):  # noqa: N807 - becomes a method
        _, order, group_ends, *_ = arguments[place].tensors
        launch = rebound(base.__call__, SingleTileScheduler=longest_first(order, group_ends))
        cute.jit(launch)(self, *arguments)

    # What is compiled is typed by its signature.
    inspect.unwrap(__call__).__signature__ = signature
    return __call__


class TreeForward(FlashAttentionForwardSm90):
    """The forward pass, with the auxiliary tensors of `TreeMask`."""

    __call__ = _longest_rows_first(FlashAttentionForwardSm90)
    kernel = cute.kernel(rebound(FlashAttentionForwardSm90.kernel, AttentionMask=TreeMask))


class TreeBackward(FlashAttentionBackwardSm90):
    """The backward pass, with the auxiliary tensors of `TreeMask`."""

    __call__ = _longest_rows_first(FlashAttentionBackwardSm90)
    kernel = cute.kernel(rebound(FlashAttentionBackwardSm90.kernel, AttentionMask=TreeMask))


class TreeBackwardInIntervals(TreeBackward):
    """The same, which works out the queries of a key block where the package looks them up."""

    load = cute.jit(rebound(FlashAttentionBackwardSm90.load, produce_block_sparse_q_loads_bwd_sm90=load_queries))
    mma = cute.jit(rebound(FlashAttentionBackwardSm90.mma, consume_block_sparse_mma_bwd_sm90=multiply_queries))
    dQaccum_store = cute.jit(  # noqa: N815 - the package's name
        rebound(
            FlashAttentionBackwardSm90.dQaccum_store,
            dQaccum_store_block_sparse_bwd_sm90=store_query_gradients,
        )
    )


@functools.cache
def forward_pass() -> Callable[..., tuple[Tensor, ...]]:
    """The package's `_flash_attn_fwd` through `TreeForward`, with a cache of compiled kernels of its own."""
    return _interface("_flash_attn_fwd", "harts_TreeForward", FlashAttentionForwardSm90=TreeForward)


@functools.cache
def backward_pass(
    config: interface.BwdConfig, kernel: type[FlashAttentionBackwardSm90] = FlashAttentionBackwardSm90
) -> Callable[..., tuple[Tensor, ...]]:
    """The package's `_flash_attn_bwd` with a tile of ours, which it takes from a function instead of an argument.

    Args:
        config: The tile. Not all of it is part of the package's key of compiled kernels, so each has its own cache.
        kernel: The package's own or one of those above.
    """
    cache = "_".join(["harts", kernel.__name__, *map(str, astuple(config))])
    tile = functools.partial(_always, config)
    return _interface("_flash_attn_bwd", cache, FlashAttentionBackwardSm90=kernel, _tile_size_bwd_sm90=tile)


def _interface(name: str, cache: str, **names: Any) -> Callable[..., tuple[Tensor, ...]]:
    function = rebound(vars(interface)[name], **names)
    # The package keeps compiled kernels by what its own sources are.
    source = hashlib.sha256(Path(flash4_parts.__file__).read_bytes()).hexdigest()
    vars(function)["compile_cache"] = get_jit_cache(f"{cache}_{source[:16]}")
    function.__globals__[name] = function
    return function


def _always(config: interface.BwdConfig, *_: Any, **__: Any) -> interface.BwdConfig:
    return config
