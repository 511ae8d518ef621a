"""The process that serves the store hangs, with its connections open: nobody waits for it for ever."""

from __future__ import annotations

import json
import signal
import socket
import tempfile
import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from bagua_rt.control import FailureBoard, RollCall
from bagua_rt.errors import CollectiveTimeoutError
from bagua_rt.rendezvous import Pace, StoreClient, meet
from tests.nursery import Child, nursery
from tests.ranks import rank_environment, run_scripts

SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
server = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
time.sleep(60)
"""


@pytest.fixture
def served(port: int) -> Iterator[tuple[StoreClient, Child]]:
    env = rank_environment()
    with tempfile.TemporaryFile() as output:
        child = nursery(env).start(SERVER, [str(port)], env, output.fileno(), output.fileno())
        try:
            store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
            yield StoreClient(store, f"127.0.0.1:{port}", "x/", ("127.0.0.1", port), timeout_s=1.0), child
        finally:
            child.kill()


def test_a_client_gives_up_in_time_and_goes_on_later(served: tuple[StoreClient, Child]) -> None:
    client, server = served
    client.set("a", "1")
    board, roll = FailureBoard(client.clone()), RollCall(client.clone(), 0, 2)
    server.stop()
    began = time.monotonic()
    assert client.glance("a") is None
    assert client.is_silent
    for _ in range(100):
        assert client.glance("a") is None
        assert board.poll() is None
    assert time.monotonic() - began < 2.0, "only the first of each client waits"
    roll.answer(lambda: "here")
    assert roll.ask(0.3) == {}
    assert "does not answer (does rank 0 hang?)" in roll.problem
    board.post("I failed")
    client.tell("b", "2")
    with pytest.raises(CollectiveTimeoutError, match="does not answer"):
        client.add("n")
    with pytest.raises(CollectiveTimeoutError, match="does not answer"):
        client.clone()
    with pytest.raises(CollectiveTimeoutError, match=r"does not answer|no answer from the store"):
        meet(client.under("meeting"), 0, 2, 0.5, "meeting")
    assert time.monotonic() - began < 8.0
    server.send_signal(signal.SIGCONT)
    client.set("c", "3", timeout_s=20.0)
    assert client.peek("a", timeout_s=20.0) == b"1"
    assert not client.is_silent
    board.close()
    pace = Pace(20.0)
    while client.peek(FailureBoard.KEY) is None and not pace.is_over:
        pace.pause()
    assert client.peek(FailureBoard.KEY) == b"I failed", "late, but not lost"
    client.close()


TRAINER = """
import json, os, signal, sys, time
import torch
import bagua_rt as bagua
from torch import nn

when, folder, deadline_s, port = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
rank = int(os.environ["RANK"])
if rank == 0:
    with open(folder + "/pid", "w") as file:
        file.write(str(os.getpid()))
bagua.init("cpu", timeout_s=deadline_s)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()


def stop(_=None):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


open(f"{folder}/{rank} has begun", "w").close()
while rank == 0 and not all(os.path.exists(f"{folder}/{other} has begun") for other in (1, 2)):
    time.sleep(0.01)  # they still needed the store
if when == "before attach":
    stop()
began = time.monotonic()
try:
    run = bagua.attach(model, optimizer, bucket_cap_mb=1e-4)
    for number in range(4):
        began = time.monotonic()
        if when == "in backward" and number == 2:
            model[0].weight.register_hook(stop)
            step()
except Exception as error:
    raised_s = time.monotonic() - began
    bagua.shutdown()
    ended_s = time.monotonic() - began - raised_s
    world_size = int(os.environ["WORLD_SIZE"]) - 1
    os.environ.update(MASTER_PORT=str(port), RANK=str(rank - 1), WORLD_SIZE=str(world_size))
    bagua.init("cpu", timeout_s=30.0)
    run = bagua.attach(model, optimizer)
    step()
    weights = [value for p in model.parameters() for value in p.flatten().tolist()]
    print(json.dumps([type(error).__name__, str(error), raised_s, ended_s, weights]))
    bagua.default_group().world.barrier().wait()
    bagua.shutdown()
    if rank == 1:
        with open(folder + "/pid") as file:
            os.kill(int(file.read()), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["before attach", "in backward"])
def test_rank_0_is_stopped_and_the_others_go_on_without_it(port: int, when: str) -> None:
    world_size, deadline_s = 3, 4.0
    env = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(world_size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = [when, folder, str(deadline_s), str(free_port())]
        stopped, *others = run_scripts([TRAINER] * world_size, env=env, args=args, timeout=90.0)
    answers = []
    for other in others:
        assert other.exit_code == 0, (other.stdout, other.stderr)
        kind, text, raised_s, ended_s, weights = json.loads(other.stdout.splitlines()[-1])
        assert kind in ("CollectiveTimeoutError", "PeerError")
        assert raised_s < deadline_s + 4.0, text  # + 1 s on a free machine
        assert ended_s < 10.0
        answers.append(weights)
    assert answers[0] == answers[1]
    assert stopped.exit_code == -signal.SIGKILL


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
