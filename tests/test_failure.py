"""Ranks that die, hang, leave or are late: the others raise in time, with names; nothing is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ScriptResult, run_scripts

DEADLINE_S = 4.0

TRAINER = """
import json, logging, os, sys, time, torch
import torch.distributed as dist
import bagua_rt as bagua
from torch import nn

logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
rank, world_size, folder, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
victim = world_size - 1
store = dist.FileStore(folder + "/store", world_size)
bagua.init("cpu", store=store, rank=rank, world_size=world_size, timeout_s=float(sys.argv[5]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = bagua.attach(model, optimizer, bucket_cap_mb=1e-4, first_bucket_mb=1e-4, name="net")


def step(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def report(**what):
    print("REPORT", json.dumps(what), flush=True)


x = torch.full((2, 4), rank + 1.0)
for _ in range(2):
    step(x)
before = [t.clone() for t in model.state_dict().values()]
momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
if rank == victim:
    if mode == "die":
        model[1].weight.register_post_accumulate_grad_hook(lambda p: os._exit(7))
    elif mode == "hang":
        while not os.path.exists(folder + "/done"):
            time.sleep(0.05)
        os._exit(0)
    elif mode == "leave":
        sys.exit(0)
    elif mode == "raise":
        raise KeyError("the user's own error")
    elif mode == "late":
        time.sleep(float(sys.argv[5]) * 0.5)
began = time.monotonic()
try:
    step(x)
except Exception as error:
    seconds = time.monotonic() - began
    same = all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))
    now = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    same &= all(torch.equal(a, b) for a, b in zip(momenta, now))
    again = []
    for use in (lambda: model(x), optimizer.step, lambda: model[0](x).sum().backward()):
        try:
            use()
        except Exception as other:
            again.append(type(other).__name__)
    report(kind=type(error).__name__, text=str(error), seconds=seconds, same=same, again=again)
    if rank == 0:
        open(folder + "/done", "w").close()
    run.close()
    bagua.shutdown()
    survivors = world_size - 1
    if mode == "die" and survivors:
        store = dist.FileStore(folder + "/again", survivors)
        bagua.init("cpu", store=store, rank=rank, world_size=survivors, timeout_s=20.0)
        run = bagua.attach(model, optimizer, name="net")
        step(x)
        report(weights=[v for t in model.state_dict().values() for v in t.flatten().tolist()])
        bagua.shutdown()
    sys.exit(5)
report(kind="", weights=[v for t in model.state_dict().values() for v in t.flatten().tolist()])
"""


def trained(tmp_path: Path, world_size: int, mode: str, deadline_s: float) -> list[ScriptResult]:
    header = "import sys; sys.argv = ['trainer', {rank!r}, {size!r}, {folder!r}, {mode!r}, {deadline!r}]\n"
    sources = [
        header.format(
            rank=str(rank), size=str(world_size), folder=str(tmp_path), mode=mode, deadline=str(deadline_s)
        )
        + TRAINER
        for rank in range(world_size)
    ]
    return run_scripts(sources, timeout=100.0, env={"BAGUA_RT_FLIGHT_DIR": str(tmp_path / "flight")})


def reports(result: ScriptResult) -> list[dict[str, Any]]:
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, result.stdout + result.stderr
    return [json.loads(line.removeprefix("REPORT ")) for line in lines]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", ["die", "leave", "raise"])
def test_b54_a_rank_that_goes_is_noticed_and_named(tmp_path: Path, world_size: int, mode: str) -> None:
    *survivors, victim = trained(tmp_path, world_size, mode, deadline_s=30.0)
    assert victim.exit_code == {"die": 7, "leave": 0, "raise": 1}[mode], victim.stderr
    for rank, result in enumerate(survivors):
        assert result.exit_code == 5, result.stderr
        report = reports(result)[0]
        assert report["kind"] == "PeerError"
        assert report["seconds"] < 6.0  # far from the deadline; about 0.6 s on a free machine
        assert report["same"]
        assert report["again"] == ["PeerError"] * 3
        assert "in round 2 of net" in report["text"]
        assert re.search(r"bucket \d+ \(.*weight", report["text"]) or "another rank failed" in report["text"]
        record = json.loads(next((tmp_path / "flight").glob(f"net.rank{rank}.*.json")).read_text())
        operations = record["communicators"][next(iter(record["communicators"]))]
        assert {operation["state"] for operation in operations} & {"failed", "under way"}
    texts = " ".join(reports(result)[0]["text"] for result in survivors)
    assert f"no answer from rank {world_size - 1}" in texts


@pytest.mark.parametrize("world_size", [2, 3])
def test_b54_survivors_go_on_in_a_smaller_world_to_the_right_weights(tmp_path: Path, world_size: int) -> None:
    *survivors, _ = trained(tmp_path, world_size, "die", deadline_s=30.0)
    weights = [reports(result)[1]["weights"] for result in survivors]
    assert all(own == weights[0] for own in weights)
    assert weights[0] == pytest.approx(_by_one_process(world_size), rel=1e-5, abs=1e-6)


def _by_one_process(world_size: int) -> list[float]:
    """Two steps of all ranks, and one of the survivors, on the whole batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for ranks in (world_size, world_size, world_size - 1):
        x = torch.cat([torch.full((2, 4), rank + 1.0) for rank in range(ranks)])
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [value for t in model.state_dict().values() for value in t.flatten().tolist()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_hangs_is_reported_half_way_and_at_the_deadline(tmp_path: Path, world_size: int) -> None:
    *waiting, _ = trained(tmp_path, world_size, "hang", DEADLINE_S)
    kinds, told = set(), ""
    for result in waiting:
        assert result.exit_code == 5, result.stderr
        report = reports(result)[0]
        kinds.add(report["kind"])
        told += report["text"]
        assert report["seconds"] < DEADLINE_S + 3.0  # deadline + 1 s on a free machine
        assert report["same"]
        warnings = [line for line in result.stdout.splitlines() if " for 2 s: " in line]
        assert len(warnings) == 1
        told += warnings[0]
    victim = world_size - 1
    assert f"rank {victim} is between generations, the last one was 1; its trainer is at" in told
    assert "CollectiveTimeoutError" in kinds
    assert kinds <= {"CollectiveTimeoutError", "PeerError"}


def test_a_rank_that_is_late_but_in_time_is_waited_for(tmp_path: Path) -> None:
    results = trained(tmp_path, 2, "late", DEADLINE_S)
    assert [result.exit_code for result in results] == [0, 0], [result.stderr for result in results]
    first, second = (reports(result)[0]["weights"] for result in results)
    assert first == second


AGREEING = """
import json, os, sys, time
import torch.distributed as dist
import bagua_rt as bagua
from torch import nn

rank, folder = int(os.environ["RANK"]), sys.argv[1]
store = dist.FileStore(folder + "/store", 4)
bagua.init("cpu", store=store, rank=rank, world_size=4, timeout_s=40.0)
run = bagua.attach(nn.Linear(2, 2))
state = run.state_dict()
if rank == 3:
    os._exit(0)
began = time.monotonic()
try:
    run.load_state_dict(state)
except bagua.errors.BaguaError as error:
    print(json.dumps([type(error).__name__, time.monotonic() - began]), flush=True)
bagua.shutdown()
open(f"{folder}/{rank} is through", "w").close()
while not all(os.path.exists(f"{folder}/{other} is through") for other in range(3)):
    time.sleep(0.01)  # the end of a process would be noticed
"""


def test_a_rank_that_is_not_connected_to_the_dead_one_hears_from_those_that_are(tmp_path: Path) -> None:
    """gloo's all-gather is a ring: one of the four waits for a rank that only the others know to be dead."""
    env = [{"RANK": str(rank), "WORLD_SIZE": "4"} for rank in range(4)]
    for result in run_scripts([AGREEING] * 4, env=env, args=[str(tmp_path)], timeout=100.0)[:3]:
        assert result.exit_code == 0, result.stderr
        kind, seconds = json.loads(result.stdout)
        assert kind == "PeerError"
        assert seconds < 20.0
