"""Settings: what is read, and that every mistake names its key."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.config import TrainConfig, dump_config, load_config
from harts.rollout.environments import ENVIRONMENTS


def test_defaults_need_no_file():
    assert load_config(None) == TrainConfig()


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("seed: 3\nrollout:\n  siblings: 4\n  num_groups: 2\n")
    config = load_config(file, ["rollout.siblings=16"])
    assert (config.seed, config.rollout.siblings, config.rollout.num_groups) == (3, 16, 2)


def test_an_empty_file_changes_nothing(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("# nothing yet\n")
    assert load_config(file) == TrainConfig()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31 - 1), st.floats(1e-6, 1), st.one_of(st.none(), st.integers(1, 9)), st.booleans())
def test_a_written_config_is_read_back_equal(tmp_path_factory, seed, rate, branch_at, scale):
    default = TrainConfig()
    config = dataclasses.replace(
        default,
        seed=seed,
        optimizer=dataclasses.replace(default.optimizer, learning_rate=rate),
        rollout=dataclasses.replace(default.rollout, branch_at=branch_at),
        objective=dataclasses.replace(default.objective, scale_by_std=scale),
    )
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1", 1.0), ("2.5e-4", 2.5e-4)])
def test_numbers_may_be_written_in_any_usual_form(text, value):
    rate = load_config(None, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate
    assert rate == value and isinstance(rate, float)


BAD = [
    ("rollout.sibling=4", "'rollout.sibling'.*rollout.siblings"),
    ("steps=4", "'steps'.*run.steps or warm_start.steps|'steps'.*warm_start.steps or run.steps"),
    ("rollout=4", "'rollout' is a group"),
    ("banana=1", "'banana'.*The keys are"),
    ("run.steps", "run.steps.*key=value"),
    ("run.steps=many", "run.steps is 'many', expected an integer"),
    ("run.steps=1.5", "run.steps is 1.5, expected an integer"),
    ("run.steps=true", "run.steps is True, expected an integer"),
    ("run.steps=0", "run.steps is 0.*>= 1"),
    ("run.steps=null", "run.steps is None, expected an integer"),
    ("rollout.branch_at=x", "rollout.branch_at is 'x', expected an integer or null"),
    ("rollout.temperature=0", "rollout.temperature is 0.0.*> 0"),
    ("rollout.temperature=.nan", "rollout.temperature is nan"),
    ("optimizer.learning_rate=.inf", "optimizer.learning_rate is inf"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast', expected a number"),
    ("objective.scale_by_std=1", "objective.scale_by_std is 1, expected true or false"),
    ("objective.name=grop", "objective.name is 'grop'.*Did you mean grpo"),
    (
        "objective.normalization=tokens",
        "objective.normalization is 'tokens', expected one of .* or null. Did you mean token",
    ),
    ("objective.clip_low=2", "objective.clip_low is 2.0.*<= 1"),
    ("rollout.environment=GuessTheNumber", "rollout.environment is 'GuessTheNumber'.*GuessTheNumber-v0-raw"),
    ("model.width=100", "model.width is 100.*multiple of 32"),
    ("seed=-1", "seed is -1"),
    ("seed=[1", "'seed' is not valid YAML"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[override for override, _ in BAD])
def test_a_mistake_names_its_key(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, [override])


def test_forks_need_an_even_number_of_siblings():
    with pytest.raises(ValueError, match=r"rollout.siblings is 3"):
        load_config(None, ["rollout.siblings=3", "rollout.branch_at=2"])


def test_a_key_of_the_file_that_does_not_exist_is_named(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("optimizer:\n  learning_rat: 1\n")
    with pytest.raises(ValueError, match=r"'optimizer.learning_rat'.*optimizer.learning_rate"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_file_without_keys_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match=r"holds a list"):
        load_config(file)


def test_every_environment_can_be_chosen():
    for name in ENVIRONMENTS:
        assert load_config(None, [f"rollout.environment={name}"]).rollout.environment == name
