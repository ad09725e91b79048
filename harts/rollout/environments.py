"""Single-player text games of textarena, one object per episode.

textarena seeds and reads Python's *global* random generator. Here that state is put back after every call, so games
neither disturb the program around them nor each other: episodes of one batch may take turns in any order.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from harts.config import EnvironmentName

ENVIRONMENTS: tuple[str, ...] = get_args(EnvironmentName)


class TextGame:
    """One episode of a game: read `observation`, answer with `step`, until `done`.

    Equal seeds give equal games. A game can be copied in the middle (`fork`) and both copies played on.

    Example:
        >>> game = TextGame("GuessTheNumber-v0-raw", seed=0)
        >>> game.step("[7]")
        >>> game.done or "target number" in game.observation
        True
    """

    def __init__(self, name: str, *, seed: int, max_turns: int | None = None, tolerated_errors: int = 1) -> None:
        """Start an episode.

        Args:
            name: One of `ENVIRONMENTS`.
            seed: >= 0. Fixes what the game draws (the number to guess, the secret code).
            max_turns: >= 1, valid moves allowed; None for the game's own limit.
            tolerated_errors: >= 0, ill-formed or illegal moves in a row that do not end the episode; 1 is textarena's.

        Raises:
            ValueError: If the game is not one of `ENVIRONMENTS`, or textarena is not installed.
        """
        if name not in ENVIRONMENTS:
            raise ValueError(f"Unknown environment '{name}'. Choose one of {', '.join(ENVIRONMENTS)}.")
        try:
            import textarena
        except ModuleNotFoundError as error:
            raise ValueError("The environments need textarena. Install it with: pip install 'harts[rl]'") from error
        self.name = name
        options = {} if max_turns is None else {"max_turns": max_turns}
        with _global_random_untouched():
            self._env: Any = textarena.make(name, **options)
            self._env.reset(num_players=1, seed=seed)
        self._env.state.error_allowance = tolerated_errors
        self.observation: str = self._read_observation()
        """What the game said since the last move, without the echo of that move."""

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self._env.state.done

    @property
    def reward(self) -> float:
        """The game's own reward, 0 to 1; known once the episode is over."""
        assert self.done, "the reward is known once the episode is over"
        return float(self._env.state.rewards[0])

    def step(self, action: str) -> None:
        """Make a move, as text."""
        with _global_random_untouched():
            self._env.step(action)
        self.observation = self._read_observation()

    def fork(self) -> TextGame:
        """An independent copy in the same state."""
        return copy.deepcopy(self)

    def random_legal_action(self, rng: random.Random) -> str:
        """A move drawn evenly from the legal ones. It uses none of the game's hints, so they are left to be learned.

        Args:
            rng: The generator to draw from.

        Returns:
            The move as text, in the form the game reads.
        """
        return rng.choice(_LEGAL_ACTIONS[self.name](self._env))

    def _read_observation(self) -> str:
        from textarena import ObservationType

        _, messages = self._env.get_observation()
        texts = [text.strip() for _, text, kind in messages if kind != ObservationType.PLAYER_ACTION]
        return "\n".join(texts)


@contextmanager
def _global_random_untouched() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _legal_guesses(env: Any) -> list[str]:
    return [f"[{n}]" for n in range(env.min_number, env.max_number + 1) if n not in env.guessed_numbers]


def _legal_disk_moves(env: Any) -> list[str]:
    towers: dict[str, list[int]] = env.state.game_state["towers"]
    return [
        f"[{source} {target}]"
        for source, target in itertools.permutations(towers, 2)
        if towers[source] and (not towers[target] or towers[target][-1] > towers[source][-1])
    ]


def _legal_codes(env: Any) -> list[str]:
    made = [entry["guess"] for entry in env.state.game_state["history"]]
    codes = itertools.permutations(range(1, env.num_numbers + 1), env.code_length)
    return [f"[{' '.join(map(str, code))}]" for code in codes if list(code) not in made]


_LEGAL_ACTIONS = {
    "GuessTheNumber-v0-raw": _legal_guesses,
    "TowerOfHanoi-v0-raw": _legal_disk_moves,
    "Mastermind-v0-raw": _legal_codes,
}
