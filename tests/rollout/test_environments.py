"""Games: repeatable, independent of each other and of the program around them."""

from __future__ import annotations

import random

import pytest

from harts.rollout.environments import ENVIRONMENTS, TextGame
from harts.rollout.random_play import play_at_random

GUESS, HANOI, MASTERMIND = "GuessTheNumber-v0-raw", "TowerOfHanoi-v0-raw", "Mastermind-v0-raw"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_equal_seeds_give_equal_games(name):
    first, second = (play_at_random(TextGame(name, seed=5), random.Random(1)) for _ in range(2))
    assert first == second


def test_the_seed_fixes_the_number_to_guess():
    def answer(seed: int) -> list[str]:
        game = TextGame(GUESS, seed=seed)
        game.step("[10]")
        return [game.observation]

    assert len({str(answer(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_global_generator_is_left_as_it_was(name):
    random.seed(42)
    expected = random.random()
    random.seed(42)
    play_at_random(TextGame(name, seed=0), random.Random(0))
    assert random.random() == expected


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_interleaved_games_equal_games_played_alone(name):
    alone = [play_at_random(TextGame(name, seed=seed), random.Random(seed)) for seed in (1, 2)]
    games, rngs = [TextGame(name, seed=seed) for seed in (1, 2)], [random.Random(seed) for seed in (1, 2)]
    transcripts: list[list[str]] = [[], []]
    while not all(game.done for game in games):
        for game, rng, transcript in zip(games, rngs, transcripts, strict=True):
            if not game.done:
                transcript += [game.observation, game.random_legal_action(rng)]
                game.step(transcript[-1])
    assert transcripts == alone


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_random_play_is_legal_to_the_end(name):
    for seed in range(5):
        transcript = play_at_random(TextGame(name, seed=seed), random.Random(seed))
        assert not any("invalid move" in text for text in transcript)


def test_random_guesses_ignore_the_hints():
    game = TextGame(GUESS, seed=0)
    secret = game._env.game_number
    wrong = "[1]" if secret != 1 else "[2]"
    game.step(wrong)
    drawn = {game.random_legal_action(random.Random(i)) for i in range(500)}
    assert drawn == {f"[{n}]" for n in range(1, 21)} - {wrong}


def test_a_fork_goes_its_own_way():
    game = TextGame(MASTERMIND, seed=3)
    game.step("[1 2 3 4]")
    fork = game.fork()
    assert fork.observation == game.observation
    fork.step("[4 3 2 1]")
    assert "4 3 2 1" in fork.observation
    assert "4 3 2 1" not in game.observation
    # The move is new to the one, and a repetition to the other.
    game.step("[4 3 2 1]")
    fork.step("[4 3 2 1]")
    assert "invalid move" in fork.observation
    assert "invalid move" not in game.observation


def test_an_observation_leaves_out_the_echo_of_the_move():
    game = TextGame(GUESS, seed=0)
    game.step("[1]" if game._env.game_number != 1 else "[2]")
    assert game.observation in ("The target number is higher.", "The target number is lower.")


def test_two_bad_moves_in_a_row_end_the_game():
    game = TextGame(GUESS, seed=0)
    game.step("nonsense")
    assert not game.done
    game.step("nonsense")
    assert game.done
    assert game.reward == 0.0


def test_without_tolerance_the_first_bad_move_ends_the_game():
    game = TextGame(GUESS, seed=0, tolerated_errors=0)
    game.step("nonsense")
    assert game.done


def test_winning_gives_reward_one():
    game = TextGame(GUESS, seed=0)
    game.step(f"[{game._env.game_number}]")
    assert game.done
    assert game.reward == 1.0


def test_max_turns_limits_the_valid_moves():
    game = TextGame(HANOI, seed=0, max_turns=2)
    transcript = play_at_random(game, random.Random(0))
    assert len(transcript) // 2 <= 3


def test_other_games_are_refused_with_the_choice():
    with pytest.raises(ValueError, match=r"'Chess-v0'.*GuessTheNumber-v0-raw"):
        TextGame("Chess-v0", seed=0)
