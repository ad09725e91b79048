"""Named rollout trees that every test shares. Each breaks something that a careless implementation gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory
from harts.data.trajectory import example_trajectories

VOCAB_SIZE = 97
"""Of the tiny models; not a multiple of any tile."""
C = 64
"""Chunk size of Gated DeltaNet."""

Words = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Case:
    """Token sequences by name; `decorate` turns them into trajectories."""

    name: str
    words: Callable[[Callable[[int], NDArray[np.int64]]], Words]
    """Given a source of fresh tokens, the sequences."""
    seed: int = 0


def trajectories_of(case: Case) -> Sequence[Trajectory]:
    """The case's trajectories, with random masks, advantages, log-probs, groups, temperatures and weights."""
    rng = np.random.default_rng(case.seed)
    return decorate(case.words(lambda n: rng.integers(0, VOCAB_SIZE, n)), rng)


def decorate(words: Words, rng: np.random.Generator) -> Sequence[Trajectory]:
    """Random training streams; the first token after every branch and the last token are trained in most."""
    trajectories = []
    for i, word in enumerate(words):
        length = word.size
        mask = rng.random(length) < 0.7
        mask[-1] = True
        mask[0] = False
        logprobs = -4.5 + 0.3 * rng.standard_normal(length)
        trajectories.append(
            Trajectory.of(
                word,
                loss_mask=mask,
                advantages=rng.standard_normal(length),
                sampling_logprobs=logprobs,
                ref_logprobs=logprobs + 0.2 * rng.standard_normal(length),
                group_id=i // 3,
                temperature=(1.0, 0.7)[i % 2],
                weight=(1.0, 2.0, 0.5)[i % 3],
            )
        )
    return trajectories


def _branches(*depths: int, tail: int = 40) -> Callable[[Callable[[int], NDArray[np.int64]]], Words]:
    """A trunk with one side leaf at each depth, and the trunk's own end."""

    def words(fresh: Callable[[int], NDArray[np.int64]]) -> Words:
        trunk = fresh(max(depths) + tail)
        return [trunk, *(np.concatenate([trunk[:p], fresh(tail)]) for p in depths)]

    return words


def _deep(fresh: Callable[[int], NDArray[np.int64]]) -> Words:
    words, trunk = [], fresh(50)
    for length, leaves in ((30, (3, 90)), (64, (3,)), (1, (90,)), (65, (3,)), (2, (90,))):
        words += [np.concatenate([trunk, fresh(n)]) for n in leaves]
        trunk = np.concatenate([trunk, fresh(length)])
    return [*words, trunk]


def _short_segments(fresh: Callable[[int], NDArray[np.int64]]) -> Words:
    trunk, words = fresh(2), []
    for length in (1, 2, 3, 1, 1, 2):
        words.append(np.concatenate([trunk, fresh(length)]))
        trunk = np.concatenate([trunk, fresh(length)])
    return [*words, trunk]


def _calls(fresh: Callable[[int], NDArray[np.int64]]) -> Words:
    prompt, words = fresh(70), []
    for _ in range(3):
        context = prompt
        for turn in (9, 30, 64):
            context = np.concatenate([context, fresh(turn)])
            words.append(context)
    return words


def _segment_lengths(fresh: Callable[[int], NDArray[np.int64]]) -> Words:
    words, trunk = [], fresh(5)
    for length in (C - 1, C, C + 1):
        trunk = np.concatenate([trunk, fresh(length)])
        words += [np.concatenate([trunk, fresh(n)]) for n in (1, C - 1)]
    return words


def _ends_inside(fresh: Callable[[int], NDArray[np.int64]]) -> Words:
    trunk = fresh(140)
    return [trunk, trunk[:100], trunk, trunk[:64], trunk[:20], trunk[:100]]


CASES = [
    Case("worked_example", lambda fresh: [t.token_ids for t in example_trajectories()]),
    Case("one_trajectory", lambda fresh: [fresh(150)]),
    Case("one_token_beside_others", lambda fresh: [np.array([3]), np.array([3, 4]), np.array([5, 6])]),
    Case("branch_on_boundary", _branches(C, 2 * C)),
    Case("branch_beside_boundary", _branches(C - 1, C + 1, 2 * C - 1)),
    Case("branch_in_first_chunk", _branches(1, 10, 30)),
    Case("branches_in_one_chunk", _branches(70, 80, 90, 100, tail=70)),
    Case("branch_at_last_token", _branches(129, tail=1)),
    Case("depth_beyond_two", _deep),
    Case("shorter_than_convolution", _short_segments),
    Case("segment_lengths_around_a_chunk", _segment_lengths),
    Case("one_sample_a_call", _calls),
    Case("ends_inside_and_duplicates", _ends_inside),
    Case("forest", lambda fresh: [w for _ in range(3) for w in _branches(65, tail=20)(fresh)]),
]
RICH = next(case for case in CASES if case.name == "depth_beyond_two")
"""Where one case must do: deep branches, several in a chunk, short and long segments."""
BESIDE = next(case for case in CASES if case.name == "branch_beside_boundary")
"""Where the tree is not the point: branches beside chunk boundaries, with half of `RICH`'s tokens."""
ANCHORS = ["qwen3", "qwen3_5_text", "qwen3_next"]
"""Full attention, a dense hybrid, one with experts: run on all cases, and on what does not depend on the family."""
ROUNDED_IN_TRANSFORMERS = {
    "gpt_oss": "probabilities before they meet values",
    "jamba": "states before they are read",
    "minimax": "decays",
}
"""What these models' own layers round and trees keep in float32, as the kernels that such models are served with do."""
QUICK_CASES = [
    case
    for case in CASES
    if case.name
    in (
        "worked_example",
        "one_token_beside_others",
        "depth_beyond_two",
        "shorter_than_convolution",
        "forest",
    )
]
"""What every family runs by default in float64; the rest of `CASES` is marked slow but for `ANCHORS`. Branches in one
chunk every family runs flat and with activation checkpointing."""
