"""For scripts that start their own ranks: by torchrun, unless a launcher has started them."""

from __future__ import annotations

import os
import sys


def is_launched() -> bool:
    """Has torchrun, srun or mpirun started this process as a rank?"""
    return any(name in os.environ for name in ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"))


def start_ranks(ranks: int) -> None:
    """Become torchrun, which starts this script once per rank; returns in a process that is one already."""
    if ranks == 1 or is_launched():
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # said here, torchrun needn't warn
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
