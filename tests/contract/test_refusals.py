"""Wrong arguments are refused before anything is launched, with a text that says what to do (B27, B28)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bagua_rt.errors import UsageError
from tests.contract.world import World, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]
Calls = dict[str, tuple[Callable[[], object], str]]


def calls_with(w: World, s: torch.Tensor) -> Calls:
    """Every operation, once for each argument that `s` could be."""
    c, n, me, dev = w.comm, w.size, w.rank, w.device.torch_device
    m, peer = s.numel(), (w.rank + 1) % w.size
    flat, wide = torch.zeros(m, device=dev), torch.zeros(m * n, device=dev)
    lists = [torch.zeros(m, device=dev) for _ in range(n)]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce_": lambda: c.all_reduce_(s),
        "all_reduce out": lambda: c.all_reduce(s, flat),
        "all_reduce inp": lambda: c.all_reduce(flat, s),
        "reduce_": lambda: c.reduce_(s, 0),
        "broadcast_": lambda: c.broadcast_(s),
        "all_gather": lambda: c.all_gather(wide, s),
        "reduce_scatter": lambda: c.reduce_scatter(s, wide),
        "all_to_all": lambda: c.all_to_all(flat, s),
        "all_to_all_v": lambda: c.all_to_all_v(lists, [s] * n),
        "gather": lambda: c.gather(lists if me == 0 else None, s),
        "scatter": lambda: c.scatter(s, lists if me == 0 else None),
        "send": lambda: c.send(s, peer),
        "recv": lambda: c.recv(s, peer),
        "send_recv": lambda: c.send_recv(s, peer, flat, peer),
    }
    return {name: (call, "contiguous") for name, call in calls.items()}


def cases(w: World) -> Calls:
    """Calls that can't be right, and a part of the text that each must give."""
    c, n, me, dev = w.comm, w.size, w.rank, w.device.torch_device
    t8 = torch.arange(8.0, device=dev)
    strided, holes = t8.view(2, 4).t(), t8.view(2, 4)[:, ::2]
    x, y, big = torch.zeros(4, device=dev), torch.zeros(4, device=dev), torch.zeros(4 * n, device=dev)
    half, meta = torch.zeros(4, dtype=torch.float16, device=dev), torch.zeros(4, device="meta")
    wrong: Any = [1.0, 2.0]
    many = [torch.zeros(4, device=dev) for _ in range(n)]
    peer = (me + 1) % n
    op: Any = "mean"
    no: dict[type, Any] = {int: 1, str: "a", list: []}
    other, finished = w.device.new_stream("other"), c.barrier()
    others: Calls = {}
    if dev != torch.device("cpu"):
        others["of the host"] = (lambda: c.all_reduce_(torch.zeros(4)), "move it there")
    for name, bad in (("transposed", strided), ("sliced", holes), ("expanded", x[:1].expand(4))):
        others |= {f"{name} {call}": fn for call, fn in calls_with(w, bad).items()}
    return others | {
        "no tensor": (lambda: c.all_reduce_(wrong), "torch.Tensor"),
        "no tensor in a list": (lambda: c.all_to_all_v([wrong] * n, many), "torch.Tensor"),
        "none": (lambda: c.all_reduce(wrong, x), "torch.Tensor"),
        "wrong device": (lambda: c.all_reduce_(meta), "meta"),
        "sparse": (lambda: c.all_reduce_(x.to_sparse()), "sparse"),
        "lazy conj": (lambda: c.broadcast_(torch.ones(2, dtype=torch.complex64, device=dev).conj()), "conj"),
        "lazy neg": (
            lambda: c.broadcast_(torch.ones(1, dtype=torch.complex64, device=dev).conj().imag),
            "neg",
        ),
        "unknown op": (lambda: c.all_reduce_(x, op), "sum, avg, max, min, prod"),
        "op no text": (lambda: c.all_reduce_(x, wrong), "sum, avg"),
        "int16": (lambda: c.all_reduce_(x.to(torch.int16), "sum"), "torch.int16"),
        "fp8": (lambda: c.reduce_(x.to(torch.float8_e4m3fn), 0), "torch.float8_e4m3fn"),
        "uint32": (lambda: c.reduce_scatter(x.to(torch.uint32), big.to(torch.uint32)), w.backend.name),
        "avg of integers": (lambda: c.all_reduce_(x.to(torch.int64)), "sum"),
        "sum of bool": (lambda: c.all_reduce_(x.to(torch.bool), "sum"), "max"),
        "max of complex": (lambda: c.all_reduce_(x.to(torch.complex64), "max"), "avg"),
        "mixed dtypes": (lambda: c.all_reduce(half, x), "torch.float16, torch.float32"),
        "mixed gather": (lambda: c.all_gather(big.half(), x), "dtype"),
        "mixed lists": (lambda: c.all_to_all_v([half, *many[1:]], many), "dtype"),
        "all_reduce size": (lambda: c.all_reduce(x, torch.zeros(5, device=dev)), "5 elements"),
        "all_gather size": (lambda: c.all_gather(torch.zeros(4 * n + 1, device=dev), x), f"{4 * n} elements"),
        "reduce_scatter size": (lambda: c.reduce_scatter(x, torch.zeros(4 * n + 1, device=dev)), "inp"),
        "all_to_all size": (lambda: c.all_to_all(x, torch.zeros(5, device=dev)), "elements"),
        "list length": (lambda: c.all_to_all_v(many[1:], many), f"{n - 1} of them"),
        "list type": (lambda: c.all_to_all_v(wrong[0], many), "float"),
        "gather list": (lambda: c.gather(many[1:] if me == 0 else many, x), "outs"),
        "scatter list": (lambda: c.scatter(x, None if me == 0 else many), "ins"),
        "gather size": (lambda: c.gather([torch.zeros(3, device=dev)] * n, x, me), "3 elements"),
        "overlap": (lambda: c.all_reduce(t8[:4], t8[2:6]), "overlap"),
        "overlap all_gather": (lambda: c.all_gather(big, big[4 * peer : 4 * peer + 4]), "overlap"),
        "overlap reduce_scatter": (lambda: c.reduce_scatter(big[4 * peer : 4 * peer + 4], big), "overlap"),
        "overlap all_to_all": (lambda: c.all_to_all(big, big), "overlap"),
        "overlap of outputs": (lambda: c.all_to_all_v([x] * n, many), "overlap"),
        "overlap send_recv": (lambda: c.send_recv(x, peer, x, peer), "overlap"),
        "root": (lambda: c.broadcast_(x, n), f"0 to {n - 1}"),
        "negative root": (lambda: c.reduce_(x, -1), "root"),
        "root no number": (lambda: c.broadcast_(x, op), "root"),
        "peer": (lambda: c.send(x, n), "peer"),
        "self": (lambda: c.send(x, me), "itself"),
        "self recv": (lambda: c.recv(x, me), "itself"),
        "half self": (lambda: c.send_recv(x, me, y, peer), "itself"),
        "stream": (lambda: c.all_reduce_(x, stream=other), "lane0, lane1"),
        "compute stream": (lambda: c.all_reduce_(x, stream=w.device.compute_stream()), "lane0, lane1"),
        "shrink to nothing": (lambda: c.shrink([me]), "itself"),
        "shrink nobody": (lambda: c.shrink([]), "duplicate"),
        "shrink no list": (lambda: c.shrink(no[int]), "a list of ranks"),
        "shrink no rank": (lambda: c.shrink([[0]]), f"0 to {n - 1}"),  # type: ignore[list-item]
        "stream no stream": (lambda: c.all_reduce_(x, stream=no[list]), "lane0, lane1"),
        "colour": (lambda: c.split(no[str]), "color"),
        "key": (lambda: c.split(0, no[str]), "key"),
        "colour too big": (lambda: c.split(2**64), "64 bits"),
        "wait": (lambda: finished.wait(no[str]), "seconds"),
        "wait less than nothing": (lambda: finished.wait(-1), "seconds"),
    }


def all_are_refused(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        w.comm.broadcast_(w.tensor([1.0]), np.int64(0)).wait()
        sent = w.comm.bytes_sent
        for name, (call, text) in cases(w).items():
            with pytest.raises(UsageError) as caught:
                call()
            assert text in str(caught.value), f"{name}: {caught.value}"
            assert isinstance(caught.value, ValueError)
        assert w.comm.bytes_sent == sent
        t = w.tensor([1.0])  # nothing was launched: the ranks are still in step
        w.comm.all_reduce_(t, "sum").wait()
        assert t.item() == w.size


@pytest.mark.parametrize("size", [2, 3])
def test_b27_wrong_arguments_are_refused_before_launch(pools: Pools, backend: str, size: int) -> None:
    pools(size).run(all_are_refused, backend)


def uneven(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        with pytest.raises(UsageError, match="multiple of 3"):
            w.comm.all_to_all(w.tensor([0.0] * 4), w.tensor([0.0] * 4))
        with pytest.raises(UsageError, match="lanes"):
            w.backend.connect(ctx.store(), w.rank, w.size, "none", [], timeout_s=5)
        with pytest.raises(UsageError, match="0 to 2"):
            w.backend.connect(ctx.store(), 3, 3, "rank", w.lanes, timeout_s=5)


def test_uneven_parts_and_wrong_connects_are_refused(pools: Pools, backend: str) -> None:
    pools(3).run(uneven, backend)
