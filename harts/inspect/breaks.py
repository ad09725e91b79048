"""Where sharing breaks: neighbours that part although they go on with the same content.

Neighbours in lexicographic order share the most, so each fork of the tree is looked at between two of them. Most forks
are what training needs (the policy sampled something else). A *break* is a fork after which both go on alike, so that
more could have been shared. The rules, in this order; those with a star need a tokenizer to see text and turns:

1. retokenised*: the next few tokens of both spell the same text with other ids.
2. tools*: inside the tool list of the first turn.
3. sampled: both next tokens are trained.
4. thinking*: one has a passage of thinking in a turn of the policy where the other has next to nothing, and both go on
   alike. Other forks in turns of the policy are sampled*.
5. shortened: one has a passage where the other has next to nothing, and both go on alike; where turns are known, the
   passage is inside one turn of somebody else.
6. edited*: inside one turn of somebody else both have a passage of their own, and the turn goes on alike.
7. prompt: nothing, or* not even the first turn is shared.
8. observation*: somebody else's turn is another. Without a tokenizer the rest is unknown.

"Go on alike" means `ALIKE` equal tokens, or all that is left of one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from harts.inspect.groups import GroupTree

ALIKE = 64
"""Equal tokens after which two trajectories count as going on alike; chance and boilerplate give fewer."""
WINDOW = 8192
"""Tokens after a fork in which to look for them."""
NEXT_TO_NOTHING = 32
"""Tokens, at most, that stand for a passage that was left out."""
SPELLED = 8
"""Tokens of each side compared as text."""
PAIRS_PER_GROUP, MAX_PAIRS = 64, 2048
EXAMPLES = 3
SHOWN = 24
"""Tokens of an example."""

HINTS = {
    "retokenised": "Train on the ids that were sampled, or tokenise histories once: text tokenised again splits "
    "elsewhere.",
    "tools": "Give all calls the same tools in the same order; sort the schemas by name.",
    "thinking": "Keep the thinking of earlier turns in the context while a task lasts, or train whole conversations "
    "(--samples final).",
    "shortened": "Shorten an observation once, before it is first shown, or in large steps: every later change forks "
    "all that follows.",
    "edited": "Take times, random ids and counters out of prompts and observations, or move them to the end; "
    "give simulated users one seed a task.",
}
"""Breaks, and what would raise sharing."""
NATURAL = ("sampled", "prompt", "observation", "unknown")
"""Forks that nothing needs to be done about, or of which nothing is known."""

_TURN = re.compile(
    r"<\|im_start\|>(?P<im>\w+)|<\|start_header_id\|>(?P<header>\w+)|<start_of_turn>(?P<gemma>\w+)|"
    r"<\|start\|>(?P<harmony>\w+)|<\|(?P<plain>system|user|assistant|tool|observation)\|>"
)
"""How chat templates begin a turn."""
_POLICY = ("assistant", "model")


class Decoder(Protocol):
    """Ids to text, special tokens included: `harts.data.rendering.Tokenizer`, say."""

    @property
    def decode(self) -> Any:
        """From a sequence of ids to text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One fork. Texts come from files: escape them before showing them."""

    group: str
    """Name of the group."""
    trajectories: tuple[int, int]
    """Numbers in the group."""
    depth: int
    """Tokens shared."""
    before: str
    """Text, or ids, of the last shared tokens."""
    first: str
    """How the first goes on."""
    second: str
    """How the second goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkKind:
    """Forks of one kind."""

    name: str
    """A key of `HINTS`, or one of `NATURAL`."""
    count: int
    """Forks."""
    tokens: int
    """Equal tokens right after the difference, summed: at least these could be shared; 0 for natural kinds."""
    examples: tuple[Example, ...]
    """The first few."""

    @property
    def hint(self) -> str:
        """What would raise sharing; empty for natural kinds."""
        return HINTS.get(self.name, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakReport:
    """All forks that were looked at."""

    forks: int
    """Forks between neighbours, in groups with token ids."""
    examined: int
    """Those looked at."""
    kinds: tuple[ForkKind, ...]
    """Breaks first, those with the most tokens before the others; kinds that do not occur are left out."""

    def to_dict(self) -> dict[str, Any]:
        """Counts for JSON, no texts."""
        kinds = {kind.name: {"forks": kind.count, "tokens": kind.tokens} for kind in self.kinds}
        return {"forks": self.forks, "examined": self.examined, "kinds": kinds}


class BreakFinder:
    """Looks at the forks of groups as they are read.

    Args:
        tokenizer: To see text and turns; None compares ids only.
    """

    def __init__(self, tokenizer: Decoder | None = None) -> None:
        """Nothing looked at yet."""
        self._tokenizer = tokenizer
        self._forks = self._examined = 0
        self._found: dict[str, tuple[int, int, list[Example]]] = {}

    def add(self, group: GroupTree) -> None:
        """Look at the forks of a group: at most `PAIRS_PER_GROUP`, evenly spread, and `MAX_PAIRS` in all."""
        if not group.trajectories:
            return
        tree = group.tree
        places = np.flatnonzero(tree.lcp_N[1:] < np.minimum(tree.length_N[1:], tree.length_N[:-1])) + 1
        self._forks += places.size
        wanted = min(places.size, PAIRS_PER_GROUP, MAX_PAIRS - self._examined)
        self._examined += wanted
        for place in places[np.arange(wanted) * places.size // max(wanted, 1)].tolist():
            pair = (int(tree.order_N[place - 1]), int(tree.order_N[place]))
            fork = Fork.of(group, pair, depth=int(tree.lcp_N[place]), tokenizer=self._tokenizer)
            kind, tokens = classify(fork)
            count, total, examples = self._found.get(kind, (0, 0, []))
            if len(examples) < EXAMPLES:
                examples.append(_example(group.name, fork))
            self._found[kind] = (count + 1, total + tokens, examples)

    def report(self) -> BreakReport:
        """What was found."""
        kinds = [
            ForkKind(name=name, count=count, tokens=tokens, examples=tuple(examples))
            for name, (count, tokens, examples) in self._found.items()
        ]
        kinds.sort(key=lambda kind: (kind.name in NATURAL, -kind.tokens, -kind.count, kind.name))
        return BreakReport(forks=self._forks, examined=self._examined, kinds=tuple(kinds))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fork:
    """Two trajectories that part."""

    pair: tuple[int, int]
    """Their numbers in the group."""
    ids: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Of both."""
    depth: int
    """Tokens shared."""
    trained: bool
    """Whether both next tokens are trained."""
    tokenizer: Decoder | None
    """To see text."""

    @classmethod
    def of(cls, group: GroupTree, pair: tuple[int, int], *, depth: int, tokenizer: Decoder | None) -> Fork:
        """The fork of two trajectories of a group after some tokens."""
        one, other = (group.trajectories[number] for number in pair)
        return cls(
            pair=pair,
            ids=(one.token_ids, other.token_ids),
            depth=depth,
            trained=bool(one.loss_mask[depth] and other.loss_mask[depth]),
            tokenizer=tokenizer,
        )

    def text(self, side: int, begin: int, end: int) -> str:
        """Text of some tokens of a trajectory."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.ids[side][max(begin, 0) : end].tolist())


def classify(fork: Fork) -> tuple[str, int]:
    """The kind of a fork, and how many equal tokens follow the difference (0 for natural kinds)."""
    from harts.inspect.resync import common, resync

    one, other = (ids[fork.depth :] for ids in fork.ids)
    spelled = None if fork.tokenizer is None else _spelled_alike(fork)
    if spelled is not None:
        return "retokenised", common(one[spelled[0] :], other[spelled[1] :])
    turn = None if fork.tokenizer is None else _turn_so_far(fork)
    if turn is None and fork.trained:
        return "sampled", 0
    skipped, kept, tokens = resync(one, other, ALIKE, WINDOW)
    if turn is None:
        return _by_ids(fork, skipped, kept, tokens)
    role, number, said = turn
    if number == 1 and "<tools>" in said and "</tools>" not in said:
        return "tools", tokens
    if fork.trained:
        return "sampled", 0
    if role in _POLICY:
        return ("thinking", tokens) if tokens and _drops_thinking(fork, said, (skipped, kept)) else ("sampled", 0)
    kind = "shortened" if _left_out(skipped, kept) else "edited"
    if tokens and _in_one_turn(fork, (skipped, kept), further=SPELLED if kind == "edited" else 0):
        return kind, tokens
    return ("prompt" if number == 1 else "observation"), 0


def _by_ids(fork: Fork, skipped: int, kept: int, tokens: int) -> tuple[str, int]:
    if fork.depth == 0:
        return "prompt", 0
    return ("shortened", tokens) if tokens and _left_out(skipped, kept) else ("unknown", 0)


def _in_one_turn(fork: Fork, passages: tuple[int, int], *, further: int) -> bool:
    """Whether no turn begins in the passages, nor in some tokens after them: a turn that ends there is another one."""
    texts = (fork.text(side, fork.depth, fork.depth + size + further) for side, size in enumerate(passages))
    return not any(_TURN.search(text) for text in texts)


def _left_out(skipped: int, kept: int) -> bool:
    """Whether one side has a passage and the other next to nothing instead."""
    return min(skipped, kept) <= NEXT_TO_NOTHING and max(skipped, kept) >= 2 * min(skipped, kept) + 2


def _spelled_alike(fork: Fork) -> tuple[int, int] | None:
    """How many tokens of each spell the same text, the fewest; None if none do."""
    texts: list[dict[str, int]] = []
    for side in (0, 1):
        spelled: dict[str, int] = {}
        for count in range(1, min(SPELLED, fork.ids[side].size - fork.depth) + 1):
            text = fork.text(side, fork.depth, fork.depth + count)
            # Part of a character says nothing yet.
            if text and not text.endswith("\ufffd"):
                spelled.setdefault(text, count)
        texts.append(spelled)
    found = [(texts[0][text], texts[1][text]) for text in texts[0] if text in texts[1]]
    return min(found, key=sum) if found else None


def _turn_so_far(fork: Fork) -> tuple[str, int, str] | None:
    """Role of the turn that both were in, 1 for the first turn or 2 for a later one, and its text up to the fork."""
    span = 512
    while True:
        begin = max(0, fork.depth - span)
        text = fork.text(0, begin, fork.depth)
        turns = list(_TURN.finditer(text))
        if turns and (begin == 0 or len(turns) > 1):
            last = turns[-1]
            role = next(name for name in last.groups() if name)
            return role, min(len(turns), 2), text[last.end() :]
        if begin == 0:
            return None
        span *= 4


def _drops_thinking(fork: Fork, said: str, passages: tuple[int, int]) -> bool:
    """Whether one side thinks where the other has next to nothing."""
    if not _left_out(*passages):
        return False
    longer = 0 if passages[0] >= passages[1] else 1
    passage = fork.text(longer, fork.depth, fork.depth + passages[longer])
    return "think>" in passage or said.rfind("<think>") > said.rfind("</think>")


def _example(group: str, fork: Fork) -> Example:
    def shown(side: int, begin: int, end: int) -> str:
        if fork.tokenizer is None:
            return " ".join(map(str, fork.ids[side][max(begin, 0) : end].tolist()))
        return fork.text(side, begin, end)

    depth = fork.depth
    first, second = (shown(side, depth, depth + SHOWN) for side in (0, 1))
    before = shown(0, depth - SHOWN, depth)
    return Example(group=group, trajectories=fork.pair, depth=depth, before=before, first=first, second=second)
