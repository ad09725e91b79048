"""The LM head: log-probs (and entropies) and their gradients, against the matrix products alone, PyTorch and Liger.

python -m benchmarks.layers lm_head                                   Qwen's vocabulary of 151,936
python -m benchmarks.layers lm_head --vocabulary 248320 --width 4096  the largest
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.layers.timing import Row, check, give_up_after, milliseconds, relative_error, report
from harts.logprobs.fused import LOGITS_AT_ONCE, FusedHead, fused_linear_logprobs
from harts.logprobs.linear_cross_entropy import LOGITS_PER_CHUNK, _Head, _LinearLogprobs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Inputs and the gradients that come back."""

    hidden_ED: Tensor
    """bfloat16."""
    weight_WD: Tensor
    """bfloat16."""
    target_E: Tensor
    """int64."""
    temperature_E: Tensor
    """float64."""
    upstream: tuple[Tensor, Tensor]
    """Of log-probs and entropies, [E] float32 each."""

    @classmethod
    def draw(cls, edges: int, width: int, vocabulary: int) -> Problem:
        """Logits of standard deviation 2."""
        generator = torch.Generator("cuda").manual_seed(0)
        draw = {"device": "cuda", "generator": generator}
        weight_WD = torch.randn(vocabulary, width, dtype=torch.bfloat16, **draw) * (2 * width**-0.5)
        return cls(
            hidden_ED=torch.randn(edges, width, dtype=torch.bfloat16, **draw).requires_grad_(),
            weight_WD=weight_WD.requires_grad_(),
            target_E=torch.randint(0, vocabulary, (edges,), **draw),
            temperature_E=torch.rand(edges, dtype=torch.float64, **draw) + 0.5,
            upstream=(torch.randn(edges, **draw), torch.randn(edges, **draw)),
        )

    def head(self, edges: int) -> Problem:
        """The same with its first edges only, in float64."""
        return Problem(
            hidden_ED=self.hidden_ED[:edges].detach().double().requires_grad_(),
            weight_WD=self.weight_WD.detach().double().requires_grad_(),
            target_E=self.target_E[:edges],
            temperature_E=self.temperature_E[:edges],
            upstream=(self.upstream[0][:edges].double(), self.upstream[1][:edges].double()),
        )

    def fused(self, *, with_entropy: bool, at_once: int = LOGITS_AT_ONCE, float32: bool = False) -> tuple[Tensor, ...]:
        """The product's path."""
        head = FusedHead(
            target_E=self.target_E,
            scale_E=(1 / self.temperature_E).float(),
            with_entropy=with_entropy,
            logits_dtype=torch.float32 if float32 else None,
            logits_at_once=at_once,
        )
        return fused_linear_logprobs(self.hidden_ED, self.weight_WD, None, head)

    def pytorch(self, *, with_entropy: bool, per_chunk: int = LOGITS_PER_CHUNK) -> tuple[Tensor, ...]:
        """The definition, in chunks of edges."""
        head = _Head(
            target_E=self.target_E,
            temperature_E=self.temperature_E,
            with_entropy=with_entropy,
            chunk=max(1, per_chunk // self.weight_WD.shape[0]),
        )
        return _LinearLogprobs.apply(self.hidden_ED, self.weight_WD, None, head)

    def gradients(self, outputs: tuple[Tensor, ...], *, with_entropy: bool, retain: bool = False) -> tuple[Tensor, ...]:
        """Of hidden states and weights."""
        count = 2 if with_entropy else 1
        leaves = (self.hidden_ED, self.weight_WD)
        return torch.autograd.grad(outputs[:count], leaves, self.upstream[:count], retain_graph=retain)


def main(arguments: list[str]) -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers lm_head", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--edges", type=int, default=32768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--liger", action="store_true", help="time Liger's mean loss, too")
    options = parser.parse_args(arguments)
    if options.liger and importlib.util.find_spec("liger_kernel") is None:
        parser.error("--liger needs liger-kernel, which is not installed. Run `pip install liger-kernel`.")
    give_up_after(300)
    problem = Problem.draw(options.edges, options.width, options.vocabulary)
    verify(problem)
    rows = list(compare(problem))
    name = f"lm_head_{options.vocabulary}_{options.width}"
    report(name, rows, as_json=options.json)
    if options.liger:
        report(f"{name}_liger", [rows[0], liger(problem)], as_json=options.json)


def verify(problem: Problem) -> None:
    """On 512 edges against float64: about as near as the definition in bfloat16, and much nearer in float32."""
    exact = problem.head(512)
    outputs = exact.pytorch(with_entropy=True)
    expected = (*outputs, *exact.gradients(outputs, with_entropy=True))
    few = Problem(
        hidden_ED=problem.hidden_ED[:512].detach().requires_grad_(),
        weight_WD=problem.weight_WD,
        target_E=problem.target_E[:512],
        temperature_E=problem.temperature_E[:512],
        upstream=(problem.upstream[0][:512], problem.upstream[1][:512]),
    )
    outputs = few.pytorch(with_entropy=True)
    definition = (*outputs, *few.gradients(outputs, with_entropy=True))
    names = ("log-probs", "entropies", "gradient of hidden states", "gradient of weights")
    for float32, least in ((False, (2e-3, 2e-3, 5e-3, 5e-3)), (True, (1e-5, 1e-5, 5e-3, 5e-3))):
        outputs = few.fused(with_entropy=True, float32=float32)
        actual = (*outputs, *few.gradients(outputs, with_entropy=True))
        for name, e, a, by_definition, bound in zip(names, expected, actual, definition, least, strict=True):
            at_most = bound if float32 else max(bound, 1.25 * relative_error(e, by_definition.double()))
            check(f"{name}, float32 logits {float32}", e, a.double(), at_most=at_most)


def compare(problem: Problem) -> Iterator[Row]:
    """One row a path; every row names its best peer, the four products that no path without stored logits avoids."""
    hidden, weight = problem.hidden_ED.detach(), problem.weight_WD.detach()
    logits = hidden[:8192] @ weight.T
    calls = (lambda: hidden[:8192] @ weight.T, lambda: logits @ weight, lambda: logits.T @ hidden[:8192])
    products = [milliseconds(call) * problem.hidden_ED.shape[0] / 8192 for call in calls]
    floor = (products[0], sum(products))
    yield {"path": "matrix products alone", "entropy": False, "forward ms": floor[0], "backward ms": floor[1]} | {
        "peak GiB": 0.0,
        "of floor": 1.0,
    }
    for with_entropy in (False, True):
        for power in (27, 28, 29, 30, 31):
            yield timed(
                problem, f"kernels, 2^{power} logits", floor, with_entropy, lambda power=power, entropy=with_entropy:
                problem.fused(with_entropy=entropy, at_once=2**power),
            )  # fmt: skip
        yield timed(
            problem, "kernels, float32 logits", floor, with_entropy,
            lambda entropy=with_entropy: problem.fused(with_entropy=entropy, float32=True),
        )  # fmt: skip
        for power in (25, 28):
            yield timed(
                problem, f"PyTorch, 2^{power} logits", floor, with_entropy, lambda power=power, entropy=with_entropy:
                problem.pytorch(with_entropy=entropy, per_chunk=2**power),
            )  # fmt: skip


def timed(
    problem: Problem,
    name: str,
    floor: tuple[float, float],
    with_entropy: bool,
    run: Callable[[], tuple[Tensor, ...]],
) -> Row:
    """Times and the memory beyond inputs and gradients."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = run()

    def backward() -> None:
        problem.gradients(outputs, with_entropy=with_entropy, retain=True)

    backward_ms = milliseconds(backward, repeats=5)
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        forward_ms = milliseconds(run, repeats=5)
    return {
        "path": name,
        "entropy": with_entropy,
        "forward ms": forward_ms,
        "backward ms": backward_ms,
        "peak GiB": peak / 2**30,
        "of floor": (forward_ms + backward_ms) / sum(floor),
    }


def liger(problem: Problem) -> Row:
    """Liger's mean loss: its gradients are made in the forward pass, for an upstream gradient of one number."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def both() -> None:
        result = LigerFusedLinearCrossEntropyFunction.apply(problem.hidden_ED, problem.weight_WD, problem.target_E)
        loss = result[0] if isinstance(result, tuple) else result
        torch.autograd.grad(loss, (problem.hidden_ED, problem.weight_WD))

    both_ms = milliseconds(both, repeats=5)
    return {
        "path": "Liger, mean loss only, forward + backward",
        "entropy": False,
        "forward ms": both_ms,
        "backward ms": 0.0,
        "peak GiB": 0.0,
        "of floor": 0.0,
    }
