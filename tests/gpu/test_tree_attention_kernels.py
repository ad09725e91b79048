"""Attention kernels on a GPU against the definition in float32, gradients included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout.attention_blocks import AttentionBlocks, attention_blocks
from harts.layout.attention_paths import attention_paths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
pytest.importorskip("flash_attn.cute")

DTYPE = torch.bfloat16
# Measured 2.0e-3 to 2.5e-3 for outputs and gradients; a masking mistake of one pair in a hundred gives more than this.
RATIO = 5e-3


@dataclass(frozen=True)
class Shape:
    """Heads of one model."""

    key_width: int
    value_width: int
    query_heads: int
    key_heads: int


SHAPES = {
    "64": Shape(64, 64, 8, 2),
    "128": Shape(128, 128, 8, 2),
    "128_five_queries": Shape(128, 128, 5, 1),
    "mla": Shape(192, 128, 4, 4),
    "192": Shape(192, 192, 4, 4),
    "256": Shape(256, 256, 4, 1),
}
Tree = tuple[NDArray[np.int64], NDArray[np.int64]]


def tree_of(up: list[int]) -> Tree:
    """Subtree ends and positions of the tree whose token `t` hangs `up[t]` above token `t - 1` (0: below it)."""
    path: list[int] = []
    end, position = np.zeros(len(up), dtype=np.int64), np.zeros(len(up), dtype=np.int64)
    for token, steps in enumerate(up):
        for _ in range(min(steps, len(path))):
            end[path.pop()] = token
        position[token] = len(path)
        path.append(token)
    end[path] = len(up)
    return end, position


def branches(prefix: int, branch: int, count: int) -> Tree:
    return tree_of([0] * prefix + ([branch] + [0] * (branch - 1)) * count)


def bushy(tokens: int) -> Tree:
    rng = np.random.default_rng(tokens)
    return tree_of([int(rng.integers(0, 40)) if rng.random() < 0.1 else 0 for _ in range(tokens)])


def forest(tokens: int) -> Tree:
    return tree_of([10_000 if token % 37 == 0 else 0 for token in range(tokens)])


TREES = {f"path_{n}": tree_of([0] * n) for n in (1, 63, 64, 65, 127, 128, 129)} | {
    "bushy_1000": bushy(1000),
    "bushy_1408": bushy(1408),
    "forest_500": forest(500),
    "branches": branches(300, 90, 7),
    "aligned_branches": branches(512, 128, 5),
    "caterpillar": tree_of([30 if token and token % 60 == 0 else 0 for token in range(1337)]),
}


def visible(tree: Tree, window: int | None) -> Tensor:
    end, position = (torch.from_numpy(x).cuda() for x in tree)
    token = torch.arange(end.numel(), device="cuda")
    mask = (token[None] <= token[:, None]) & (token[:, None] < end[None])
    return mask if window is None else mask & (position[:, None] - position[None] < window)


def inputs_of(shape: Shape, tokens: int, sinks: bool = False) -> list[Tensor]:
    """Views of [T, heads, width], as modules make them."""
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    sizes = (
        (shape.query_heads, shape.key_width),
        (shape.key_heads, shape.key_width),
        (shape.key_heads, shape.value_width),
    )
    made = [
        torch.randn(tokens, heads, width, device="cuda", generator=generator).to(DTYPE).transpose(0, 1)
        for heads, width in sizes
    ]
    return made + ([torch.randn(shape.query_heads, device="cuda", generator=generator).to(DTYPE)] if sinks else [])


def expected_of(inputs: list[Tensor], mask: Tensor, scale: float, upstream: Tensor) -> list[Tensor]:
    """Output and gradients in float32."""
    leaves = [x.detach().float().requires_grad_() for x in inputs]
    query, key, value = leaves[:3]
    groups = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(groups, 0).transpose(-1, -2) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    if len(leaves) == 4:
        sink = leaves[3][:, None, None].expand(-1, scores.shape[1], 1)
        probabilities = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    output = probabilities @ value.repeat_interleave(groups, 0)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.float())]


def blocks_of(tree: Tree, forward: tuple[int, int], backward: tuple[int, int], window: int | None) -> AttentionBlocks:
    return attention_blocks(*tree, forward_size=forward, backward_size=backward, window=window).to(torch.device("cuda"))


def run(kernel: str, tree: Tree, inputs: list[Tensor], window: int | None, *, deterministic: bool = False) -> Tensor:
    query, key, value = inputs[:3]
    sink = inputs[3] if len(inputs) == 4 else None
    scale = query.shape[-1] ** -0.5
    if kernel == "flash4":
        from harts.layers.tree_attention.flash4 import tiles_for, tree_attention_flash4

        tiles = tiles_for(query.shape[-1], value.shape[-1])
        blocks = blocks_of(tree, tiles.forward, tiles.backward_block, window)
        return tree_attention_flash4(
            query, key, value, blocks=blocks, scale=scale, sink_H=sink, deterministic=deterministic
        )
    from harts.layers.tree_attention.flex import BLOCK_SIZE, block_mask, tree_attention_flex

    mask = block_mask(blocks_of(tree, BLOCK_SIZE, BLOCK_SIZE, window))
    return tree_attention_flex(query, key, value, mask=mask, scale=scale, sink_H=sink)


def with_gradients(kernel: str, tree: Tree, inputs: list[Tensor], *, window: int | None, **options: bool):
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = run(kernel, tree, leaves, window, **options)
    generator = torch.Generator(device="cuda").manual_seed(1)
    upstream = torch.randn(output.shape, device="cuda", generator=generator).to(DTYPE)
    return upstream, [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def check(kernel: str, tree: Tree, inputs: list[Tensor], *, window: int | None = None, **options: bool):
    upstream, actual = with_gradients(kernel, tree, inputs, window=window, **options)
    expected = expected_of(inputs, visible(tree, window), inputs[0].shape[-1] ** -0.5, upstream)
    names = ("output", "query", "key", "value", "sink")
    # A path of one token has no gradient of queries and keys: all are measured against the largest.
    norms = [x.norm() / x.numel() ** 0.5 for x in expected]
    for name, e, a, norm in zip(names, expected, actual, norms, strict=False):
        error = (e - a.float()).norm() / e.numel() ** 0.5
        floor = 0.01 * max(norms[1:4]) if name in ("query", "key") else 0.0
        assert torch.isfinite(a).all(), f"{name} is not finite"
        assert error <= RATIO * max(norm, floor), f"{name}: error {error:.2e} of {norm:.2e}"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What kernels leave unwritten is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# Every new shape, window, sink and single-block call compiles for seconds, so wide heads see few trees.
@pytest.mark.parametrize(
    ("shape", "tree"),
    [("128", tree) for tree in TREES]
    + [(shape, tree) for shape in ("64", "mla", "256") for tree in ("path_1", "bushy_1408", "caterpillar")],
)
def test_flash4_on_trees(shape: str, tree: str):
    check("flash4", TREES[tree], inputs_of(SHAPES[shape], TREES[tree][0].size))


@pytest.mark.parametrize(("shape", "window"), [(shape, None) for shape in SHAPES] + [("mla", 100), ("256", 100)])
def test_flash4_on_shapes(shape: str, window: int | None):
    check("flash4", TREES["bushy_1408"], inputs_of(SHAPES[shape], 1408), window=window)


@pytest.mark.parametrize("window", [1, 17, 129])
@pytest.mark.parametrize("tree", ["caterpillar", "bushy_1000", "path_65"])
def test_flash4_in_windows(tree: str, window: int):
    check("flash4", TREES[tree], inputs_of(SHAPES["128"], TREES[tree][0].size), window=window)


@pytest.mark.parametrize(("shape", "window"), [("64", 128), ("128", 128), ("256", None)])
def test_flash4_with_sinks(shape: str, window: int | None):
    check("flash4", TREES["bushy_1000"], inputs_of(SHAPES[shape], 1000, sinks=True), window=window)


@pytest.mark.parametrize("shape", ["128", "mla"])
def test_deterministic_gradients_are_equal_from_run_to_run(shape: str):
    inputs = inputs_of(SHAPES[shape], 1408)
    check("flash4", TREES["bushy_1408"], inputs, deterministic=True)
    runs = [with_gradients("flash4", TREES["bushy_1408"], inputs, window=None, deterministic=True)[1] for _ in range(5)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(("shape", "window", "sinks"), [("128", None, False), ("256", 100, True), ("mla", None, False)])
def test_flex(shape: str, window: int | None, sinks: bool):
    inputs = inputs_of(SHAPES[shape], 1408, sinks)
    check("flex", TREES["bushy_1408"], inputs, window=window)
    runs = [with_gradients("flex", TREES["bushy_1408"], inputs, window=window)[1] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("shape", "window"), [("128", None), ("128", 100), ("mla", None), ("256", None)])
@pytest.mark.parametrize("tree", ["branches", "caterpillar", "path_129"])
def test_exact_mode_equals_every_path_alone(shape: str, tree: str, window: int | None):
    from harts.layers.tree_attention.exact import tree_attention_exact

    end, position = TREES[tree]
    inputs = [x.detach().requires_grad_() for x in inputs_of(SHAPES[shape], end.size)]
    scale = inputs[0].shape[-1] ** -0.5
    paths = attention_paths(end, position)
    output = tree_attention_exact(*inputs, paths=paths.to(torch.device("cuda")), scale=scale, window=window)
    query_ends, key_ends = paths.query_ends.tolist(), paths.key_ends.tolist()
    for number in range(len(key_ends) - 1):
        path = paths.key_index[key_ends[number] : key_ends[number + 1]].cuda()
        alone = [x.detach()[:, path] for x in inputs]
        single = attention_paths(np.full(path.numel(), path.numel()), np.arange(path.numel()))
        result = tree_attention_exact(*alone, paths=single.to(torch.device("cuda")), scale=scale, window=window)
        new = slice(query_ends[number], query_ends[number + 1])
        # Tokens of the shared prefix too: any path through them gives the same bits.
        assert torch.equal(result, output.detach()[:, path])
        assert torch.equal(result[:, path.numel() - (new.stop - new.start) :], output.detach()[:, new])
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, inputs, upstream)
    expected = expected_of(inputs, visible((end, position), window), scale, upstream)
    for e, a in zip(expected, [output.detach(), *grads], strict=True):
        assert (e - a.float()).norm() <= RATIO * e.norm()


@pytest.mark.parametrize("kernel", ["flash4", "flex"])
def test_layers_never_wait_for_the_gpu(kernel: str):
    """Second call of a layer, as all but the first layer's first microbatch: no transfer, no synchronisation."""
    from harts.layers.tree_attention import flash4, flex

    shape, tree = SHAPES["128"], TREES["bushy_1408"]
    inputs = [x.requires_grad_() for x in inputs_of(shape, 1408)]
    tiles = flash4.tiles_for(shape.key_width, shape.value_width)
    upstream = torch.ones(shape.query_heads, 1408, shape.value_width, device="cuda", dtype=DTYPE)
    if kernel == "flash4":
        blocks = blocks_of(tree, tiles.forward, tiles.backward_block, None)
    else:
        mask = flex.block_mask(blocks_of(tree, flex.BLOCK_SIZE, flex.BLOCK_SIZE, None))

    def layer():
        if kernel == "flash4":
            output = flash4.tree_attention_flash4(*inputs, blocks=blocks, scale=0.1)
        else:
            output = flex.tree_attention_flex(*inputs, mask=mask, scale=0.1)
        torch.autograd.grad(output, inputs, upstream)

    layer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_blocks_of_other_tiles_are_refused():
    from harts.layers.tree_attention.flash4 import tree_attention_flash4

    blocks = blocks_of(TREES["path_64"], (64, 64), (64, 64), None)
    with pytest.raises(ValueError, match="tiles_for"):
        tree_attention_flash4(*inputs_of(SHAPES["128"], 64), blocks=blocks, scale=0.1)
