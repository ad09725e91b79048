"""Playing a batch of games with the model's own caches, in token lockstep.

Every game of the batch has read the same number of tokens at any moment. A step feeds each equally many more: one
sampled just now, or some of its pending observation. So there is no padding and no mask. Padding would not be neutral
here: it would enter the state of a linear-attention layer and shift its chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from harts.rollout.environments import TextGame
from harts.rollout.episode import Episode
from harts.rollout.tokenizer import TurnTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How actions are drawn."""

    temperature: float
    """> 0. Tokens are drawn from softmax(logits / temperature), all of it."""
    max_action_tokens: int
    """>= 1. Longest action, its end included. One that is not ended by then is cut there and makes no legal move."""
    branch_at: int | None = None
    """>= 1. A game still running after this many turns is copied, and both copies are played on; None: never."""


@dataclass(slots=True)
class _Player:
    """A game being played."""

    game: TextGame
    group_id: int
    ids: list[int]
    logprobs: list[float]
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)

    def observe(self, token_ids: Sequence[int]) -> None:
        self.ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.begin.append(len(self.ids))

    def fork(self) -> _Player:
        return _Player(
            game=self.game.fork(),
            group_id=self.group_id,
            ids=list(self.ids),
            logprobs=list(self.logprobs),
            begin=list(self.begin),
            end=list(self.end),
        )

    def episode(self) -> Episode:
        return Episode(
            token_ids=np.array(self.ids, dtype=np.int64),
            sampling_logprobs=np.array(self.logprobs, dtype=np.float64),
            action_begin=np.array(self.begin, dtype=np.int64),
            action_end=np.array(self.end, dtype=np.int64),
            group_id=self.group_id,
            reward=self.game.reward,
        )


class _CachedModel:
    """A causal language model that remembers what each row of a batch has read."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)  # pyright: ignore[reportArgumentType]
        # transformers 5.24 calls the argument `cache`; releases before call it `past_key_values`.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def read(self, token_ids_BL: Tensor) -> Tensor:
        """Feed tokens; returns the logits [B, W] after the last."""
        output = self._model(token_ids_BL, use_cache=True, logits_to_keep=1, **{self._cache_argument: self._cache})
        return output.logits[:, -1]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        self._cache.reorder_cache(torch.tensor(rows))  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def play_with_model(
    model: nn.Module,
    tokenizer: TurnTokenizer,
    games: Sequence[tuple[int, TextGame]],
    *,
    settings: SamplingSettings,
    generator: torch.Generator,
) -> list[Episode]:
    """Play games to their end with the policy.

    Args:
        model: A causal language model of transformers.
        tokenizer: The model's.
        games: At least one (group id, game at its first observation).
        settings: How actions are drawn.
        generator: Where the draws come from; an equal state gives equal episodes.

    Returns:
        The episodes in the order they ended.
    """
    players = []
    for group_id, game in games:
        player = _Player(game=game, group_id=group_id, ids=[], logprobs=[])
        player.observe(tokenizer.encode_observation(game.observation))
        players.append(player)
    num_read = _num_common([player.ids for player in players])
    # The shared beginning of all prompts is read once, by one row that then becomes all of them.
    cached = _CachedModel(model)
    logits_BW = cached.read(torch.tensor([players[0].ids[:num_read]])).expand(len(players), -1)
    cached.select_rows([0] * len(players))
    episodes: list[Episode] = []
    while True:
        # The other rows have tokens of an observation left to read.
        writing = [row for row, player in enumerate(players) if len(player.ids) == num_read]
        _write(players, writing, logits_BW, settings=settings, generator=generator)
        rows: list[int] = []
        playing: list[_Player] = []
        for row, player in enumerate(players):
            forked = _end_turn(player, tokenizer, settings) if row in writing else None
            for survivor in (player, forked):
                if survivor is not None and not survivor.game.done:
                    rows.append(row)
                    playing.append(survivor)
            if player.game.done:
                episodes.append(player.episode())
        if not playing:
            return episodes
        if rows != list(range(len(players))):
            cached.select_rows(rows)
        players = playing
        num_known = min(len(player.ids) for player in players)
        logits_BW = cached.read(torch.tensor([player.ids[num_read:num_known] for player in players]))
        num_read = num_known


def _num_common(prompts: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with."""
    # What the first and the last in sorted order share, all share.
    first, last = min(prompts), max(prompts)
    return next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def _write(
    players: Sequence[_Player],
    writing: Sequence[int],
    logits_BW: Tensor,
    *,
    settings: SamplingSettings,
    generator: torch.Generator,
) -> None:
    """Sample one token for each of these rows."""
    if not writing:
        return
    logprobs_BW = torch.log_softmax(logits_BW[list(writing)].float() / settings.temperature, dim=-1)
    token_BL = torch.multinomial(logprobs_BW.exp(), 1, generator=generator)
    logprob_B = logprobs_BW.gather(1, token_BL)[:, 0].tolist()
    for row, token, logprob in zip(writing, token_BL[:, 0].tolist(), logprob_B, strict=True):
        players[row].ids.append(token)
        players[row].logprobs.append(logprob)


def _end_turn(player: _Player, tokenizer: TurnTokenizer, settings: SamplingSettings) -> _Player | None:
    """Make the player's move if its action is complete; returns the copy if the game forks here."""
    action = player.ids[player.begin[-1] :]
    if action[-1] != tokenizer.end_id and len(action) < settings.max_action_tokens:
        return None
    # An action without an end is no move, or whatever follows a complete one would never matter.
    player.game.step(tokenizer.decode(action) if action[-1] == tokenizer.end_id else "")
    player.end.append(len(player.ids))
    if player.game.done:
        return None
    player.observe(tokenizer.encode_observation(player.game.observation))
    return player.fork() if len(player.end) == settings.branch_at else None
