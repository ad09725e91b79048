"""Forks of known kinds, with a tokenizer of single characters, special tokens and one merge."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data import RolloutGroup, Trajectory
from harts.inspect.breaks import HINTS, NATURAL, PAIRS_PER_GROUP, BreakFinder, BreakReport
from harts.inspect.groups import group_tree
from harts.inspect.resync import resync


@dataclass
class Toy:
    """A tokenizer that learns its vocabulary from what it is given."""

    vocabulary: list[str] = field(default_factory=list)

    def encode(self, text: str, merge: str = "<|im_end|>") -> list[int]:
        pieces = re.findall(rf"{re.escape(merge)}|<\|im_start\|>|<\|im_end\|>|.", text, re.DOTALL)
        for piece in pieces:
            if piece not in self.vocabulary:
                self.vocabulary.append(piece)
        return [self.vocabulary.index(piece) for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


SYSTEM = turn("system", "Be kind.")
TASK = turn("user", "Find the bug.")
LOOK = turn("assistant", "I look at the file that was named in the report, from its first line on.")
REST = LOOK + turn("user", "It has three lines and none of them is wrong as far as one can see from here.")
LONG = " ".join(str(n) for n in range(300))

CASES = {
    "tools": (turn("system", "<tools>\n[read]\n[write]\n</tools>") + TASK + REST,
              turn("system", "<tools>\n[write]\n[read]\n</tools>") + TASK + REST),
    "thinking": (SYSTEM + TASK + turn("assistant", f"<think>\n{LONG}\n</think>\n\nYes.") + REST,
                 SYSTEM + TASK + turn("assistant", "Yes.") + REST),
    "thinking, emptied": (SYSTEM + TASK + turn("assistant", f"<think>\n{LONG}\n</think>\n\nYes.") + REST,
                          SYSTEM + TASK + turn("assistant", "<think>\n\n</think>\n\nYes.") + REST),
    "shortened": (SYSTEM + TASK + LOOK + turn("user", LONG) + REST,
                  SYSTEM + TASK + LOOK + turn("user", "(300 numbers)") + REST),
    "edited": (SYSTEM + turn("user", "At 12:31:07 begin with the work, please.") + REST,
               SYSTEM + turn("user", "At 12:48:55 begin with the work, please.") + REST),
    "sampled": (SYSTEM + TASK + turn("assistant", "I will look.") + REST,
                SYSTEM + TASK + turn("assistant", "Let me open that file at once and read.") + REST),
    "observation": (SYSTEM + TASK + LOOK + turn("user", "No such file.") + REST,
                    SYSTEM + TASK + LOOK + turn("user", "Permission denied.") + REST),
    "prompt": (turn("system", "Be kind."), turn("system", "Be brief.")),
}  # fmt: skip


def look(*ids: list[int], toy: Toy | None, trained: bool = False) -> BreakReport:
    finder = BreakFinder(toy)
    trajectories = tuple(Trajectory.of(i, loss_mask=(np.arange(len(i)) > 0) & trained) for i in ids)
    finder.add(group_tree(RolloutGroup(name="g", trajectories=trajectories)))
    return finder.report()


@pytest.mark.parametrize("case", CASES)
def test_kinds(case: str):
    toy = Toy()
    report = look(*map(toy.encode, CASES[case]), toy=toy)
    (kind,) = report.kinds
    assert kind.name == case.split(",", maxsplit=1)[0]
    assert (kind.count, report.forks, report.examined) == (1, 1, 1)
    assert (kind.tokens >= 64) == bool(kind.hint) == (kind.name in HINTS)


def test_every_kind_has_a_case():
    assert {case.split(",")[0] for case in CASES} == {*HINTS, *NATURAL} - {"retokenised", "unknown"}


def test_text_tokenised_again():
    toy = Toy()
    text = SYSTEM + TASK + REST
    report = look(toy.encode(text), toy.encode(text, merge="file"), toy=toy)
    (kind,) = report.kinds
    assert kind.name == "retokenised"
    rest = text.partition("file")[2]
    assert kind.tokens == len(toy.encode(rest))
    (example,) = kind.examples
    assert {example.first[:9], example.second[:9]} == {"file that"}
    assert example.before.endswith("look at the ")
    assert (example.group, sorted(example.trajectories)) == ("g", [0, 1])


def test_what_the_policy_sampled_is_no_break():
    toy = Toy()
    ids = [toy.encode(text) for text in CASES["shortened"]]
    assert [kind.name for kind in look(*ids, toy=toy, trained=True).kinds] == ["sampled"]
    assert [kind.name for kind in look(*ids, toy=None, trained=True).kinds] == ["sampled"]


@pytest.mark.parametrize(
    ("case", "kind"), [("shortened", "shortened"), ("thinking", "shortened"), ("observation", "unknown")]
)
def test_without_a_tokenizer_only_ids_are_compared(case: str, kind: str):
    toy = Toy()
    report = look(*map(toy.encode, CASES[case]), toy=None)
    assert [k.name for k in report.kinds] == [kind]
    assert re.fullmatch(r"[\d ]+", report.kinds[0].examples[0].first)


def test_nothing_shared_is_another_prompt():
    assert [kind.name for kind in look([1, 2], [3, 4], toy=None).kinds] == ["prompt"]


def test_a_trajectory_inside_another_is_no_fork():
    assert look([1, 2], [1, 2], [1, 2, 3], toy=None).to_dict() == {"forks": 0, "examined": 0, "kinds": {}}


def test_only_some_forks_of_a_large_group_are_examined():
    report = look(*([1, n] for n in range(2, 203)), toy=None)
    assert (report.forks, report.examined) == (200, PAIRS_PER_GROUP)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), st.randoms(use_true_random=False))
def test_resync_skips_as_little_as_possible(skipped, kept, common, random):
    fresh = iter(random.sample(range(1000), skipped + kept + common))
    one, other, rest = ([next(fresh) for _ in range(n)] for n in (skipped, kept, common))
    found = resync(np.array(one + rest, dtype=np.int64), np.array(other + rest, dtype=np.int64), 20, 12)
    assert found == ((skipped, kept, common) if common >= 16 else (0, 0, 0))
    near = resync(np.array(one + rest, dtype=np.int64), np.array(other + rest, dtype=np.int64), 20, 4)
    assert near == ((skipped, kept, common) if common >= 16 and max(skipped, kept) <= 4 else (0, 0, 0))
