"""Checkpoints: complete or invisible."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harts.train.checkpoint
from harts.config import ModelConfig
from harts.rollout.tokenizer import END, TurnTokenizer
from harts.train.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_reference,
    load_trainer_state,
    save_checkpoint,
    write_atomically,
)
from harts.train.optimizer import make_optimizer, update
from harts.train.policy import random_policy


@pytest.fixture(scope="module")
def tokenizer() -> TurnTokenizer:
    return TurnTokenizer.build(["a b c"], 300)


def make(step: int, *, with_reference: bool = False) -> Checkpoint:
    module = random_policy(ModelConfig(num_layers=2, width=32), vocab_size=300, seed=step)
    optimizer = make_optimizer(module, learning_rate=0.1, weight_decay=0.0)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(optimizer, learning_rate=0.1, max_grad_norm=1.0)
    reference = random_policy(ModelConfig(num_layers=2, width=32), vocab_size=300, seed=99)
    return Checkpoint(step=step, module=module, optimizer=optimizer, reference=reference if with_reference else None)


def save(folder, checkpoint, tokenizer):
    return save_checkpoint(folder, checkpoint, tokenizer.bpe, end_token=END)


def test_what_is_saved_comes_back(tmp_path, tokenizer):
    checkpoint = make(3, with_reference=True)
    path = save(tmp_path, checkpoint, tokenizer)
    assert latest_checkpoint(tmp_path) == path
    step, state = load_trainer_state(path)
    assert step == 3
    other = make(4)
    other.optimizer.load_state_dict(state)
    for mine, theirs in zip(checkpoint.module.parameters(), other.module.parameters(), strict=True):
        saved, loaded = checkpoint.optimizer.state[mine], other.optimizer.state[theirs]
        assert all(torch.equal(torch.as_tensor(saved[key]), torch.as_tensor(loaded[key])) for key in saved)
    assert load_reference(path, other.module)
    assert checkpoint.reference is not None
    expected = checkpoint.reference.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.module.state_dict().items())


def test_without_a_reference_there_is_none(tmp_path, tokenizer):
    checkpoint = make(1)
    path = save(tmp_path, checkpoint, tokenizer)
    assert not load_reference(path, checkpoint.module)


def test_transformers_reads_it(tmp_path, tokenizer):
    checkpoint = make(1)
    path = save(tmp_path, checkpoint, tokenizer)
    model, loaded = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert torch.equal(model.lm_head.weight, checkpoint.module.lm_head.weight)
    assert loaded.encode("a b") == tokenizer.bpe.encode("a b").ids
    assert loaded.eos_token_id == tokenizer.end_id


def test_only_the_newest_is_kept(tmp_path, tokenizer):
    for step in (8, 9, 10):
        save(tmp_path, make(step), tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_there_may_be_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("broken", ["torch.save", "rename", "remove"])
def test_an_interrupted_save_leaves_a_usable_checkpoint(tmp_path, tokenizer, monkeypatch, broken):
    save(tmp_path, make(1), tokenizer)

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if broken == "torch.save":
            patch.setattr(torch, "save", kill)
        elif broken == "rename":
            patch.setattr(harts.train.checkpoint.Path, "rename", kill)
        else:
            patch.setattr(harts.train.checkpoint, "_remove", kill)
        with pytest.raises(Killed):
            save(tmp_path, make(2), tokenizer)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.name == ("step-000002" if broken == "remove" else "step-000001")
    assert load_trainer_state(latest)[0] == int(latest.name[-1])
    AutoModelForCausalLM.from_pretrained(latest)
    # The next save clears what the interrupted one left.
    save(tmp_path, make(3), tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "config.yaml"
    write_atomically(file, "one")
    write_atomically(file, "two")
    assert file.read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
