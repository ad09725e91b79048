"""Checkpoints: the model in transformers' form for exchange, and what else a run needs to continue bit-equal.

A checkpoint is written into a temporary folder that is renamed when complete, and older ones go only after that. So a
process killed at any moment leaves its last complete checkpoint, and readers see no other. Draws are seeded by step,
so the step stands for the state of every random generator.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_COMPLETE = re.compile(r"step-(\d+)")
_TRAINER_FILE, _REFERENCE_FILE = "trainer.pt", "reference.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checkpoint:
    """What a run is made of between two steps."""

    step: int
    """Steps done, those of the warm start included."""
    module: PreTrainedModel
    """The policy."""
    optimizer: torch.optim.Optimizer
    """Its optimizer."""
    reference: PreTrainedModel | None
    """The frozen policy of a KL penalty; None without one."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer, *, end_token: str) -> Path:
    """Write a checkpoint and remove older ones.

    Args:
        folder: Holds the checkpoints of one run.
        checkpoint: What to write.
        tokenizer: The policy's, saved with it.
        end_token: Its end-of-turn token.

    Returns:
        The checkpoint's folder, `step-NNNNNN`; `AutoModelForCausalLM.from_pretrained` reads it.
    """
    complete = folder / f"step-{checkpoint.step:06d}"
    partial = complete.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    checkpoint.module.save_pretrained(partial)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token).save_pretrained(partial)
    torch.save({"step": checkpoint.step, "optimizer": checkpoint.optimizer.state_dict()}, partial / _TRAINER_FILE)
    if checkpoint.reference is not None:
        save_file(dict(checkpoint.reference.state_dict()), partial / _REFERENCE_FILE)
    if complete.exists():
        _remove(complete)
    partial.rename(complete)
    for path in list(folder.iterdir()):
        if path != complete:
            _remove(path)
    return complete


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    if not folder.is_dir():
        return None
    steps = {int(match[1]): path for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))}
    return steps[max(steps)] if steps else None


def load_trainer_state(checkpoint: Path) -> tuple[int, dict[str, object]]:
    """Steps done and the optimizer's state."""
    state = torch.load(checkpoint / _TRAINER_FILE, weights_only=True)
    return state["step"], state["optimizer"]


def load_reference(checkpoint: Path, module: PreTrainedModel) -> bool:
    """Fill a module with the reference policy's weights; False, and nothing done, if the checkpoint has none."""
    file = checkpoint / _REFERENCE_FILE
    if not file.is_file():
        return False
    module.load_state_dict(load_file(file))
    return True


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that a reader, or a killed writer, never leaves a part of it."""
    partial = file.with_suffix(f"{file.suffix}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def _remove(path: Path) -> None:
    """Remove a checkpoint; killed on the way, it no longer looks complete."""
    doomed = path if path.suffix == ".partial" else path.with_suffix(".partial")
    if path != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    shutil.rmtree(doomed)
