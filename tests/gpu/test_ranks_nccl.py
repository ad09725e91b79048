"""Steps across ranks with NCCL: two processes, each with a GPU of its own, beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.train.rank_steps import check_processes, run_process

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} NVIDIA GPUs"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs PyTorch with NCCL"),
]


def test_processes_train_the_step_of_one(tmp_path: Path):
    """In float64 to the tenth digit, in float32 with the noise of one process; `tests/train/test_ranks.py` runs the
    same with gloo."""
    # Copies of a process that has used a GPU cannot use one, so each starts anew.
    start_processes(run_process, args=(RANKS, str(tmp_path), "cuda"), nprocs=RANKS, start_method="spawn")
    check_processes(RANKS, tmp_path, "cuda")
