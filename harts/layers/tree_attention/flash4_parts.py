"""What trees need of FlashAttention-4's kernels on Hopper and the package does not have.

Three parts, put into its kernels by `flash4_kernels.py`:

- `TreeMask`. The package asks a mask function pair by pair, each of which waits for a load of its own: a masked block
  then costs as much as three. Here a thread loads the subtree ends of its keys once.
- `longest_first`. Rows of a tree differ much in what they list: keys of a shared prefix are seen by all queries. In
  index order, the long rows of the last head run while most of the device has nothing left.
- Loops over the queries of a key block. In pre-order these are one interval, with the full blocks inside another:
  nothing needs to be looked up between blocks.
"""

# Installed with the `gpu` extra only; what CuTe compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Int32, const_expr, cute
from flash_attn.cute.block_sparse_utils import _load_q_do_block_sm90, _store_one_dQaccum_sm90
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack import layout_utils
from quack.cute_dsl_utils import ParamsBase

from harts.layout.attention_blocks import GROUPS


class TreeMask(AttentionMask):
    """Hides keys that a query does not see.

    The auxiliary tensors of a call are the subtree ends, order and groups of its lists' rows, and with a window the
    positions of tokens and the ends of their windows.
    """

    def apply_mask(self, acc_S: cute.Tensor, **asked: Any) -> None:
        """Mask the scores of a block; without a `mask_mod` it is full, and only what lies behind the last key goes."""
        if asked.get("mask_mod") is None:
            super().apply_mask(acc_S, **asked)
        else:
            subtree_end, _, _, *window = asked["aux_data"].tensors
            self.hide(acc_S, asked["m_block"], asked["n_block"], asked["thr_mma"], subtree_end, *window)

    @cute.jit
    def hide(
        self,
        acc_S: cute.Tensor,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        subtree_end: cute.Tensor,
        *window: cute.Tensor,
    ) -> None:
        """Set the scores of hidden keys to minus infinity; `subtree_end` is 0 behind the last key."""
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
        shape = (self.tile_n, self.tile_m) if const_expr(self.swap_AB) else (self.tile_m, self.tile_n)
        places = cute.make_identity_tensor(shape)
        own = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(places), transpose=self.swap_AB)
        # Of thread 0: known while compiling, and as far from one another as those of any thread.
        first = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(places), transpose=self.swap_AB)
        windowed = len(window) == 2
        query_mode, key_mode = (1, 0) if const_expr(self.swap_AB) else (0, 1)
        first_key = own[0][key_mode] + n_block * self.tile_n
        below = cute.make_rmem_tensor(cute.size(own.shape[1]), Int32)
        window_end = cute.make_rmem_tensor(cute.size(own.shape[1]), Int32)
        for column in cutlass.range_constexpr(cute.size(own.shape[1])):
            key = first_key + first[0, column][key_mode]
            below[column] = subtree_end[key] - key
            if const_expr(windowed):
                window_end[column] = window[1][key]
        for row in cutlass.range_constexpr(cute.size(own.shape[0])):
            query = own[row, 0][query_mode] + m_block * self.tile_m
            if const_expr(self.qhead_per_kvhead_packgqa != 1):
                query = query // self.qhead_per_kvhead_packgqa
            position = Int32(0)
            if const_expr(windowed):
                position = window[0][query]
            for column in cutlass.range_constexpr(cute.size(own.shape[1])):
                distance = query - first_key - first[0, column][key_mode]
                seen = (distance >= 0) & (distance < below[column])
                if const_expr(windowed):
                    seen = seen & (position < window_end[column])
                scores[row, column] = scores[row, column] if seen else -cutlass.Float32.inf


def longest_first(order: cute.Tensor, group_ends: cute.Tensor) -> type[_LongestFirst]:
    """A tile scheduler that takes rows as `BlockLists` orders them: a group of one head, the same of the next, ...

    Few heads are under way at a time, as their queries and keys are to stay in the second-level cache.
    """

    class LongestFirst(_LongestFirst):
        @staticmethod
        def to_underlying_arguments(args: Any, **_: Any) -> _LongestFirst.Params:
            return _LongestFirst.Params(
                order=order,
                group_ends=group_ends,
                rows=Int32(cute.size(order)),
                heads=args.num_head,
                blocks=args.num_block,
                packed=args.qhead_per_kvhead_packgqa,
            )

    return LongestFirst


class _LongestFirst:
    """One work item a program, as the package's `SingleTileScheduler`."""

    @dataclass
    class Params(ParamsBase):
        """What the launch gives to all programs."""

        order: cute.Tensor
        group_ends: cute.Tensor
        rows: Int32
        heads: Int32
        blocks: Int32
        packed: cutlass.Constexpr[int] = 1

    def __init__(self, params: Params, tile: Int32, *, loc: Any = None, ip: Any = None) -> None:
        self.params, self._tile, self._loc, self._ip = params, tile, loc, ip

    @classmethod
    def create(cls, params: Params, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> _LongestFirst:
        """The scheduler of this program."""
        return cls(params, cute.arch.block_idx()[0], loc=loc, ip=ip)

    @staticmethod
    def get_grid_shape(params: Params, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32, Int32]:
        """Blocks of the launch."""
        return params.rows * params.packed * params.heads, Int32(1), Int32(1)

    @cute.jit
    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        """Block, head, batch entry and split of this program."""
        params = self.params
        begin, end = Int32(0), params.group_ends[0]
        for group in cutlass.range_constexpr(GROUPS - 1):
            if self._tile >= params.group_ends[group] * params.packed * params.heads:
                begin, end = params.group_ends[group], params.group_ends[group + 1]
        there = cutlass.max(end - begin, 1) * params.packed
        place = self._tile - begin * params.packed * params.heads
        head = place // there
        place = begin * params.packed + place - head * there
        block = Int32(params.blocks)
        if self._tile < params.rows * params.packed * params.heads:
            block = params.order[place // params.packed] * params.packed + place % params.packed
        # Heads packed into rows need not fill the last row.
        return WorkTileInfo((block, Int32(head), Int32(0), Int32(0)), block < params.blocks)

    def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        """The same before the first block."""
        return self.get_current_work(loc=loc, ip=ip)

    def prefetch_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        """There is none."""

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        """There is none: go behind the last one."""
        self._tile = self.params.rows * self.params.packed * self.params.heads

    def producer_tail(self, *, loc: Any = None, ip: Any = None) -> None:
        """Nothing is left to do."""

    def __extract_mlir_values__(self) -> list[Any]:
        parts = [cutlass.extract_mlir_values(part) for part in (self.params, self._tile)]
        self._lengths = [len(part) for part in parts]
        return [value for part in parts for value in part]

    def __new_from_mlir_values__(self, values: list[Any]) -> _LongestFirst:
        cut = self._lengths[0]
        params = cutlass.new_from_mlir_values(self.params, values[:cut])
        return type(self)(params, cutlass.new_from_mlir_values(self._tile, values[cut:]), loc=self._loc)


@cute.jit
def _queries(lists: Any, batch: Int32, head: Int32, block: Int32) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """Query blocks of a key block: the first one, partial ones before the full ones, all partial ones, the first full
    one, and all. Partial ones come first, as in the package's loops."""
    partial_count, partial_index, full_count, full_index, *_ = lists
    masked, full = partial_count[batch, head, block], full_count[batch, head, block]
    first, first_full = partial_index[batch, head, block, 0], full_index[batch, head, block, 0]
    before = masked
    if full > 0:
        before = cutlass.max(first_full - first, 0)
    if masked == 0:
        before = Int32(0)
    return first, before, masked, first_full, masked + full


@cute.jit
def _query_block(number: Int32, first: Int32, before: Int32, masked: Int32, first_full: Int32, count: Int32) -> Int32:
    """The query block that comes `number`-th, of what `_queries` says."""
    block = first + number
    if number >= before:
        # Behind the full ones.
        block = first_full + count - masked + number - before
    if number >= masked:
        block = first_full + number - masked
    return block


@cute.jit
def load_queries(lists: Any, batch: Int32, head: Int32, n_block: Int32, *step: Any, **options: Any) -> tuple[Any, Any]:
    """Load the queries and output gradients of a key block, in place of `produce_block_sparse_q_loads_bwd_sm90`."""
    assert options["q_subtile_factor"] == 1
    state_q, state_do, *where = step
    stages = options["Q_stage_eq_dO_stage"]
    queries = _queries(lists, batch, head, n_block)
    if queries[4] > 0:
        state_q, state_do = _load_q_do_block_sm90(
            _query_block(Int32(0), *queries), state_q, state_do, *where, stages, load_kv=True
        )
    for number in cutlass.range(1, queries[4], unroll=1):
        state_q, state_do = _load_q_do_block_sm90(
            _query_block(number, *queries), state_q, state_do, *where, stages, load_kv=False
        )
    return state_q, state_do


@cute.jit
def multiply_queries(
    lists: Any, batch: Int32, head: Int32, n_block: Int32, *step: Any, **options: Any
) -> tuple[Any, Any]:
    """Add up the gradients of a key block, in place of `consume_block_sparse_mma_bwd_sm90`."""
    assert options["q_subtile_factor"] == 1
    state_q, state_do, multiply, mask, mask_mod = step
    first, before, masked, first_full, count = _queries(lists, batch, head, n_block)
    hide = partial(
        mask.apply_mask,
        n_block=n_block,
        thr_mma=options["thr_mma_SdP"],
        mask_mod=mask_mod,
        aux_data=options["aux_data"],
    )
    modify = {name: options[name] for name in ("score_mod_fn", "score_mod_bwd_fn")}
    accumulate = Boolean(False)
    # A block of keys that is not whole holds what is no key, which a full block of queries does not see either.
    limit = masked
    if (n_block + 1) * mask.tile_n > mask.seqlen_k:
        limit = count
    for number in cutlass.range(limit, unroll=1):
        block = _query_block(number, first, before, masked, first_full, count)
        state_q, state_do = multiply(block, state_q, state_do, mask_fn=hide, dKV_accumulate=accumulate, **modify)
        accumulate = Boolean(True)
    for number in cutlass.range(limit, count, unroll=1):
        block = first_full + number - masked
        state_q, state_do = multiply(block, state_q, state_do, mask_fn=None, dKV_accumulate=accumulate, **modify)
        accumulate = Boolean(True)
    return state_q, state_do


@cute.jit
def store_query_gradients(
    lists: Any, batch: Int32, head: Int32, n_block: Int32, shared: cute.Tensor, gradients: cute.Tensor, **options: Any
) -> None:
    """Add what a key block gives to the query gradients, in place of `dQaccum_store_block_sparse_bwd_sm90`."""
    assert options["q_subtile_factor"] == 1
    queries = _queries(lists, batch, head, n_block)
    names = ("num_dQ_warp_groups", "num_threads_per_warp_group", "tma_copy_bytes_dQ")
    for number in cutlass.range(queries[4], unroll=1):
        _store_one_dQaccum_sm90(_query_block(number, *queries), shared, gradients, *[options[name] for name in names])
