"""What train_gpt.py shows at its end: equal replicas, and its step time beside torch DDP's."""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn

import bagua_rt as bagua


def fingerprint(model: nn.Module) -> bytes:
    """SHA-256 of every parameter: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def distinct_replicas(pg: bagua.ProcessGroup, model: nn.Module) -> set[bytes]:
    """The fingerprints that the ranks' replicas have; one, if they are bit-equal. Collective."""
    mine = torch.frombuffer(bytearray(fingerprint(model)), dtype=torch.uint8).to(pg.device)
    everyones = mine.new_empty(pg.world_size * mine.numel())
    pg.world.all_gather(everyones, mine).wait()
    return {bytes(row.tolist()) for row in everyones.view(pg.world_size, -1)}


def largest_spread(pg: bagua.ProcessGroup, model: nn.Module) -> float:
    """The most by which a weight differs between two ranks. Collective."""
    high = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    low = high.clone()
    pg.world.all_reduce_(high, "max").wait()
    pg.world.all_reduce_(low, "min").wait()
    return float((high - low).max())


def replicas_report(pg: bagua.ProcessGroup, model: nn.Module, *, must_be_equal: bool) -> tuple[bool, str]:
    """Are the replicas what they must be, and a line that says so. Collective."""
    distinct = distinct_replicas(pg, model)
    if len(distinct) == 1:
        return True, f"replicas: bit-equal on {pg.world_size} rank(s), sha256 {distinct.pop().hex()[:16]}…"
    spread = f"a weight differs between ranks by at most {largest_spread(pg, model):.2g}"
    if must_be_equal:
        return False, f"replicas: NOT bit-equal: {len(distinct)} different ones, {spread}"
    return True, f"replicas: not bit-equal, which this algorithm doesn't aim at: {spread}"


def join_torch_group(pg: bagua.ProcessGroup) -> None:
    """Make torch's default process group, which its DistributedDataParallel needs, on a store of its own."""
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if pg.node_count == 1 else socket.gethostname())
    served = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False) if pg.rank == 0 else None
    host, port = pg.world.broadcast_object((host, served.port if served else 0))
    store = served or distributed.TCPStore(host, port)
    backend = "nccl" if pg.device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=pg.rank, world_size=pg.world_size)


def compare_step_times(
    pg: bagua.ProcessGroup,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
    *,
    rounds: int = 7,
    steps: int = 3,
) -> str:
    """Alternate short blocks of both kinds of steps, so that other load hits both alike. Collective."""

    def block(step: Callable[[], Tensor]) -> float:
        pg.world.barrier().wait()
        start = time.perf_counter()
        losses = [step() for _ in range(steps)]
        losses[-1].item()  # on a GPU, waits for the block
        return (time.perf_counter() - start) / steps * 1e3

    block(ours), block(theirs)  # the first steps plan buckets
    pairs = [(block(ours), block(theirs)) for _ in range(rounds)]
    ours_ms, theirs_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(mine / other for mine, other in pairs)
    return (
        f"step time: {ours_ms:.0f} ms, torch DDP {theirs_ms:.0f} ms; median of the rounds' ratios "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} alternating rounds "
        f"of {steps} steps, over this machine's loopback: compression gains on slow networks)"
    )
