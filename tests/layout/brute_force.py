"""The fewest rounds, runs and replayed tokens of small tries, by trying every set of runs. Knows no theorem.

What a run may be (rounds.py states the same in words): it follows one path from a boundary, that is the root or the
end of a full chunk; rows whose output is not taken come first, and the first one taken is in the first chunk; every
token's output is taken from one run. So runs are the pieces of a partition of the trie into downward paths: where a
piece begins fixes where its run starts and what it replays.
"""

from __future__ import annotations


class Trie:
    """Prefixes of some words, parents before children."""

    def __init__(self, words: list[str]) -> None:
        self.prefixes = sorted({word[: d + 1] for word in words for d in range(len(word))})
        self.number = {prefix: i for i, prefix in enumerate(self.prefixes)}
        self.parent = [self.number.get(prefix[:-1], -1) for prefix in self.prefixes]

    def boundary(self, token: int, chunk_size: int) -> int:
        """Last token before the chunk of `token`, -1 for the first chunk."""
        prefix = self.prefixes[token]
        return self.number.get(prefix[: (len(prefix) - 1) // chunk_size * chunk_size], -1)


def fewest(words: list[str], chunk_size: int, *, interior_states: bool) -> tuple[int, int, int]:
    """Least rounds, runs and replayed tokens over all sets of runs, each for itself.

    Args:
        words: Trajectories.
        chunk_size: C.
        interior_states: Whether a run returns its states at all boundaries, or at its end only.
    """
    search = _Search(Trie(words), chunk_size, interior_states)
    search.go(0)
    return search.best[0], search.best[1], search.best[2]


class _Search:
    """Tokens one after the other: each goes on with the piece of its parent or begins one."""

    def __init__(self, trie: Trie, chunk_size: int, interior_states: bool) -> None:
        size = len(trie.prefixes)
        self.parent = trie.parent
        self.boundary = [trie.boundary(token, chunk_size) for token in range(size)]
        self.replay = [(len(prefix) - 1) % chunk_size for prefix in trie.prefixes]
        self.interior_states = interior_states
        self.round = [0] * size  # of the run that owns each token
        self.goes_on = [False] * size  # whether some child continues the token's piece
        self.must_end = [0] * size  # how many pieces begin with the state after the token
        self.totals = (0, 0, 0)  # rounds, runs, replayed tokens so far
        self.best = [size + 1, size + 1, size * chunk_size + 1]

    def go(self, token: int) -> None:
        if all(now >= best for now, best in zip(self.totals, self.best, strict=True)):
            return  # totals only grow
        if token == len(self.parent):
            self.best = [min(now, best) for now, best in zip(self.totals, self.best, strict=True)]
            return
        above, before = self.parent[token], self.boundary[token]
        if above >= 0 and not self.goes_on[above] and (self.interior_states or not self.must_end[above]):
            self.goes_on[above] = True
            self.round[token] = self.round[above]
            self.go(token + 1)
            self.goes_on[above] = False
        if before < 0 or self.interior_states or not self.goes_on[before]:
            totals = self.totals
            self.round[token] = 0 if before < 0 else self.round[before] + 1
            self.totals = (max(totals[0], self.round[token] + 1), totals[1] + 1, totals[2] + self.replay[token])
            if before >= 0:
                self.must_end[before] += 1
            self.go(token + 1)
            if before >= 0:
                self.must_end[before] -= 1
            self.totals = totals


def shortest_critical_path(parent: list[int], chunks: list[int], num_rounds: int) -> int:
    """Least sum of the rounds' longest runs over all schedules of so many rounds."""
    best = sum(chunks)
    longest = [0] * num_rounds
    rounds: list[int] = []

    def place(run: int) -> None:
        nonlocal best
        if run == len(parent):
            best = min(best, sum(longest))
            return
        for number in range(rounds[parent[run]] + 1 if parent[run] >= 0 else 0, num_rounds):
            before = longest[number]
            longest[number] = max(before, chunks[run])
            rounds.append(number)
            place(run + 1)
            rounds.pop()
            longest[number] = before

    place(0)
    return best
