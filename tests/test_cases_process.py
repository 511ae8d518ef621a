"""A process's end while a model is attached: within seconds, with its own exit code, without noise."""

from __future__ import annotations

import pytest

from tests.ranks import run_scripts

TRAINER = """
import gc, os, signal, sys, threading
import torch
import bagua_rt as bagua
from torch import nn

how = sys.argv[1]
group = bagua.init("cpu", timeout_s=20)
rank = group.rank
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = bagua.attach(model, optimizer, bucket_cap_mb=1e-4)


def step():
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


for _ in range(2):
    step()
print("trained", flush=True)
if how == "raise" and rank == 1:
    raise ValueError("mine")
if how == "twice":
    run.close(); run.close(); bagua.shutdown(); bagua.shutdown(); run.close()
if how == "uneven" and rank == 0:
    run.close(); bagua.shutdown()
if how == "cycle":
    run = [run]
    run.append(run)
    del run
    collector = threading.Thread(target=gc.collect)
    collector.start(); collector.join()
if how == "in the midst of backward":
    if rank == 0:
        model[0].weight.register_hook(lambda grad: sys.exit(4))
    step()
if how == "killed":
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
"""

ENDS = {
    "raise": (0, 1),
    "twice": (0, 0),
    "uneven": (0, 0),
    "cycle": (0, 0),
    "in the midst of backward": (4, 1),
    "killed": (-9, 1),
}


@pytest.mark.parametrize("how", ENDS)
def test_b58_a_trainer_ends_with_its_own_exit_code(port: int, how: str) -> None:
    env = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in (0, 1)
    ]
    found = run_scripts([TRAINER] * 2, env=env, args=[how], timeout=100.0)
    assert tuple(each.exit_code for each in found) == ENDS[how], [each.stderr for each in found]
    first = min(each.seconds for each in found)
    for each in found:
        assert each.stdout == "trained\n"
        assert each.seconds < first + 10.0
        for noise in ("Exception ignored", "terminate called", "Fatal Python error", "Segmentation"):
            assert noise not in each.stderr, each.stderr
    if ENDS[how][1] == 1 and how != "raise":
        assert "PeerError" in found[1].stderr
