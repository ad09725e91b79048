"""Candidates for the tiles of tree attention, measured with `--sweep`; `flash4.tiles_for` holds the best."""

from __future__ import annotations

from dataclasses import replace

from harts.layers.tree_attention.flash4 import Tiles, tiles_for


def variants(head_width: int, value_width: int) -> dict[str, Tiles]:
    """The product's tiles with one change each, by name; all were compiled for sm_90 first, and spill little."""
    tiles = tiles_for(head_width, value_width)
    found: dict[str, Tiles] = {}
    for keys in _FORWARD_KEYS[head_width]:
        found[f"forward {tiles.forward[0]}x{keys}"] = replace(tiles, forward=(tiles.forward[0], keys))
    if head_width == value_width:
        found["forward heads apart"] = replace(tiles, pack_gqa=False)
    found["backward looked up" if tiles.intervals else "backward in intervals"] = replace(
        tiles, intervals=not tiles.intervals
    )
    return found | _backward(tiles, head_width)


_FORWARD_KEYS = {128: (160, 176), 192: (96, 112), 256: (64,)}


def _backward(tiles: Tiles, head_width: int) -> dict[str, Tiles]:
    own = tiles.backward
    if head_width == 128:
        # What the package takes without a causal mask.
        wide = replace(own, m_block_size=80, dQ_swapAB=True)
        return {"backward 80x128": replace(tiles, backward=wide)}
    if head_width == 192:
        return {"backward 64x96, 3 groups": replace(tiles, backward=replace(own, AtomLayoutNdKV=3, num_wg=3))}
    single = replace(own, n_block_size=64, num_stages_Q=1)
    return {
        "backward 64x64, one buffer of Q": replace(tiles, backward=single),
        "backward 64x64, the package's": replace(tiles, backward=replace(single, dKV_swapAB=False)),
    }
