"""The demo's policy is a hybrid, repeatable, and remembers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from harts.config import ModelConfig
from harts.models import prepare
from harts.train.policy import STEP_SIZES, load_policy, random_policy


@pytest.mark.parametrize(
    ("num_layers", "kinds"), [(2, "lf"), (3, "llf"), (4, "lllf"), (6, "lllfll"), (8, "lllflllf")], ids=str
)
def test_layers_are_mixed_like_those_of_the_big_models(num_layers, kinds):
    policy = random_policy(ModelConfig(num_layers=num_layers, width=32), vocab_size=300, seed=0)
    assert "".join(kind[0] for kind in policy.config.layer_types) == kinds


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, second, other = (
        random_policy(ModelConfig(width=32), vocab_size=300, seed=seed).state_dict() for seed in (3, 3, 4)
    )
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_heads_remember_over_many_lengths():
    policy = random_policy(ModelConfig(width=128), vocab_size=300, seed=0)
    sizes = torch.cat(
        [functional.softplus(p).detach() for name, p in policy.named_parameters() if name.endswith("dt_bias")]
    )
    assert sizes.min() >= STEP_SIZES[0] * 0.99
    assert sizes.max() <= STEP_SIZES[1] * 1.01
    assert sizes.max() / sizes.min() > 3


def test_a_prepared_policy_is_saved_and_loaded_bit_equal(tmp_path):
    policy = random_policy(ModelConfig(width=32), vocab_size=300, seed=0)
    expected = {name: value.clone() for name, value in policy.state_dict().items()}
    prepare(policy).module.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
