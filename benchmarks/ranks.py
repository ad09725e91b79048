"""The prefix tree across ranks, and moving trajectories to where they run: processor time and bytes.

    python -m benchmarks.ranks                    10^8 token ids on 8 ranks, minutes; reports/ranks.md
    python -m benchmarks.ranks --quick --no-report

Ranks are threads that take turns; their processor time is that of a rank alone, without the network. Every result is
compared with the order and common prefixes of one process, and what arrives with what was sent, before a figure is
printed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import markdown_table, provenance, report_file
from harts.cli.model_names import find_costs
from harts.data import Trajectory
from harts.data.exchange import ThreadExchange, run_in_threads
from harts.data.ragged import ranges
from harts.data.redistribute import bits_to_move, gather_records, redistribute
from harts.plan.locality import Holdings, run_where_held, running_ranks
from harts.plan.plan import make_plan
from harts.plan.simulate import per_call
from harts.plan.size import size_of_tree
from harts.plan.swaps import swap_home
from harts.tree import PrefixTree, tree_from_lcp
from harts.tree.across_ranks import sort_across_ranks
from harts.tree.identities import TokenIdentities
from harts.tree.lcp import sort_tokens

Row = dict[str, object]
RANKS = 8
MODEL = "default:qwen3_next"
MAX_TOKENS = 65_536
TRAINED = 0.05
"""Share of each trajectory that is trained, at its end; those tokens have an advantage and sampling log-probs."""
HOW_MOVED = (
    f"Planned for {RANKS} ranks with the costs of `{MODEL}` and at most {MAX_TOKENS:,} tokens a microbatch. The last "
    f"{TRAINED:.0%} of each trajectory are trained and have one advantage and float32 sampling log-probs. *Whole* is "
    "what those take that move, sent as they are: ids as 4 bytes, masks as bits, streams as float64."
)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the tokens")
    parser.add_argument("--no-report", action="store_true", help="leave reports/ranks.md as it is")
    options = parser.parse_args()
    list(measure(64))  # compiles, or loads from the cache
    rows, moves = zip(*measure(100 if options.quick else 10_000), strict=True)
    tables = f"{markdown_table(rows)}\n\n## To the ranks that run them\n\n{HOW_MOVED}\n\n{markdown_table(moves)}\n"
    if not options.no_report:
        facts = "\n".join(f"- {name}: {value}" for name, value in provenance().items())
        report_file("ranks.md").write_text(f"# Steps across ranks\n\n{facts}\n\n{tables}", encoding="utf-8")
    print(json.dumps({"rows": rows, "moves": moves, **provenance()}) if options.json else tables)


def measure(trajectories: int) -> Iterator[tuple[Row, Row]]:
    """What the tree takes, and the moves after it, for three shapes of about 10,000 tokens a trajectory and one of 200,
    each dealt in two ways."""
    shapes = (
        ("16 of a prompt, a small step", siblings(512 if trajectories > 512 else trajectories, 10_000), 16),
        ("16 of a prompt", siblings(trajectories, 10_000), 16),
        ("one a call", per_call(trajectories), 160),
        ("16 short ones of a prompt", siblings(10 * trajectories, 200), 16),
    )
    for name, tree, group in shapes:
        number_N = np.arange(tree.length_N.size)
        tokens_F, offsets = tokens_of(tree, seed=0)
        begin = time.thread_time()
        order_N, lcp_N = sort_tokens(tokens_F, offsets)
        alone = time.thread_time() - begin
        rng = np.random.default_rng(1)
        for dealing in ("whole groups", "at random"):
            rank_N = number_N // group % RANKS if dealing == "whole groups" else rng.integers(0, RANKS, number_N.size)
            head: Row = {"trajectories": number_N.size, "shape": name, "dealt": dealing}
            yield (
                {
                    **head,
                    "token ids": tokens_F.size,
                    "distinct": tree.num_tokens,
                    "CPU s, one process": alone,
                    **across_ranks(tokens_F, offsets, rank_N, (order_N, lcp_N)),
                },
                {**head, **moved(tokens_F, rank_N, tree_from_lcp(order_N, np.diff(offsets)[order_N], lcp_N))},
            )


def siblings(trajectories: int, length: int) -> PrefixTree:
    """Sixteen trajectories a prompt, which is half of each."""
    number_N = np.arange(trajectories)
    return tree_from_lcp(number_N, np.full_like(number_N, length), np.where(number_N % 16 > 0, length // 2, 0))


def across_ranks(
    tokens_F: NDArray[np.int64],
    offsets: NDArray[np.int64],
    rank_N: NDArray[np.int64],
    expected: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Row:
    """Seconds and bytes of the rank with the most.

    Raises:
        SystemExit: If a rank's result is not that of one process.
    """
    length_N = np.diff(offsets)

    def work(exchange: ThreadExchange) -> tuple[float, int, int]:
        mine = np.flatnonzero(rank_N == exchange.rank)
        part = TokenIdentities(
            token_ids_F=tokens_F[ranges(offsets[mine], length_N[mine])],
            offsets=np.concatenate([[0], np.cumsum(length_N[mine])]),
        )
        begin = time.thread_time()
        found = sort_across_ranks(part, exchange, numbers=mine)  # type: ignore[arg-type]
        seconds = time.thread_time() - begin
        for got, wanted in zip((found.order_N, found.lcp_N), expected, strict=True):
            if not np.array_equal(got, wanted):
                raise SystemExit(f"Rank {exchange.rank} found another order than one process.")
        return seconds, exchange.bytes_received, exchange.num_calls

    found = run_in_threads(RANKS, work)
    received = [megabytes / 1e6 for _, megabytes, _ in found]
    return {
        "CPU s, slowest rank": max(seconds for seconds, _, _ in found),
        "MB received, a rank": sum(received) / RANKS,
        "MB, most": max(received),
        "MB, all ids of the others": 4 * tokens_F.size * (RANKS - 1) / RANKS / 1e6,
        "calls": found[0][2],
    }


def moved(tokens_F: NDArray[np.int64], rank_N: NDArray[np.int64], tree: PrefixTree) -> Row:
    """Bytes that bring trajectories to where a plan runs them, and what they would be whole.

    Raises:
        SystemExit: If a trajectory arrives changed.
    """
    costs = find_costs(MODEL).costs
    cost = costs.tree.for_planner(
        size_of_tree(tree, chunk_size=costs.chunk_size, windows=costs.windows), windows=costs.windows
    )
    plan = make_plan(tree, max_tokens_per_microbatch=MAX_TOKENS, cost=cost, ranks=RANKS, barrier=False)
    length_N = np.empty_like(rank_N)
    length_N[tree.order_N] = tree.length_N
    ids = np.split(tokens_F, np.cumsum(length_N)[:-1])
    by_chance = int((running_ranks(plan) != rank_N).sum())

    def work(exchange: ThreadExchange) -> tuple[NDArray[np.int64], float, float]:
        numbers = np.flatnonzero(rank_N == exchange.rank)
        own = [trained_at_end(ids[number], number) for number in numbers]
        records = gather_records(own, exchange, numbers, rank_N=rank_N, length_N=length_N)
        bits_N, bits_per_token = bits_to_move(records)
        holdings = Holdings(rank_N=rank_N, bits_N=bits_N, bits_per_token=bits_per_token)
        begin = time.thread_time()
        numbered = run_where_held(plan, tree, holdings)
        near = swap_home(numbered, tree, holdings, cost=cost)
        placing = time.thread_time() - begin
        target_N = running_ranks(near)
        before, begin = exchange.bytes_received, time.thread_time()
        here = redistribute(own, exchange, records, target_N, order_N=tree.order_N, lcp_N=tree.lcp_N)
        seconds = time.thread_time() - begin
        ran = np.flatnonzero(target_N == exchange.rank)
        if not all(same(t, trained_at_end(ids[number], number)) for t, number in zip(here, ran, strict=True)):
            raise SystemExit(f"Rank {exchange.rank} got other tokens or streams than were sent.")
        come = ran[rank_N[ran] != exchange.rank]
        tokens, trained, received = length_N[come].sum(), records.count_N[come].sum(), exchange.bytes_received - before
        masks, streams = tokens // 8, [form for form in records.formats.values() if form.is_sent]
        values = sum(np.dtype(f.dtype).itemsize * f.sizes(records.count_N[come]).sum() for f in streams)
        whole = 4 * tokens, masks + 8 * len(streams) * trained
        stay = (running_ranks(numbered) == rank_N)[numbers].sum()
        return np.array([come.size, numbers.size - stay, received, *whole, masks + values]), placing, seconds

    counts, placing, seconds = zip(*run_in_threads(RANKS, work), strict=True)
    come, numbered, received, ids_whole, streams_whole, streams = np.array(counts).T
    return {
        "that move": int(come.sum()),
        "without swaps": int(numbered.sum()),
        "with ranks numbered by chance": by_chance,
        "MB received a rank, whole": (ids_whole + streams_whole).mean() / 1e6,
        "MB received a rank": received.mean() / 1e6,
        "MB of ids, whole": ids_whole.mean() / 1e6,
        "MB of ids": (received - streams).mean() / 1e6,
        "MB of masks and streams, whole": streams_whole.mean() / 1e6,
        "MB of masks and streams": streams.mean() / 1e6,
        "MB, most": received.max() / 1e6,
        "CPU s to number and swap": max(placing),
        "CPU s to move": max(seconds),
    }


def trained_at_end(token_ids: NDArray[np.int64], number: int) -> Trajectory:
    """A trajectory whose last tokens are trained."""
    size = token_ids.size
    trained = max(1, round(TRAINED * size))
    logprobs = np.zeros(size)
    logprobs[-trained:] = -np.random.default_rng(number).random(trained, dtype=np.float32)
    return Trajectory(
        token_ids=token_ids,
        loss_mask=np.arange(size) >= size - trained,
        advantages=np.broadcast_to(np.sin(number), size),
        sampling_logprobs=logprobs,
    )


def same(one: Trajectory, other: Trajectory) -> bool:
    """Whether tokens, masks and the streams of trained tokens are equal, bit for bit."""
    mask = one.loss_mask
    pairs = [(t.token_ids, t.loss_mask, t.advantages[mask], t.sampling_logprobs[mask]) for t in (one, other)]  # type: ignore[index]
    return all(a.tobytes() == b.tobytes() for a, b in zip(*pairs, strict=True))


def tokens_of(tree: PrefixTree, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Random token ids that share what the tree says, as flat ids and offsets."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(tree.length_N)])
    tokens_F = rng.integers(0, 150_000, offsets[-1])
    for i in range(1, tree.length_N.size):
        lcp = tree.lcp_N[i]
        tokens_F[offsets[i] : offsets[i] + lcp] = tokens_F[offsets[i - 1] : offsets[i - 1] + lcp]
    return tokens_F, offsets


if __name__ == "__main__":
    main()
