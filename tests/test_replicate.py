"""Tensors made equal to rank 0's: bits, identity, layout, versions; errors on every rank."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.backend import Communicator, Device
from bagua_rt.control import Control
from bagua_rt.errors import UsageError
from bagua_rt.replicate import TensorReplicator, replicate_optimizers, replicate_tensors
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]


class Job(NamedTuple):
    comm: Communicator
    device: Device
    control: Control

    def tensors(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        replicate_tensors(tensors, self.comm, self.device, root)

    def optimizers(self, *optimizers: torch.optim.Optimizer, **options: Any) -> None:
        replicate_optimizers(optimizers, self.comm, self.device, self.control, **options)


@contextlib.contextmanager
def job(ctx: RankContext) -> Iterator[Job]:
    store = ctx.store() if ctx.world_size > 1 else None
    with bagua.init("cpu", store=store, rank=ctx.rank, world_size=ctx.world_size, timeout_s=20.0) as group:
        made = group.connect("replicate", 1)
        control = group.control("replicate")
        try:
            yield Job(made.world, group.backend.device, control)
        finally:
            control.close()
            made.close()


def run(pool: RankPool, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on every rank; with time for a busy machine to import torch."""
    return pool.run(fn, *args, timeout=110.0)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in the order of its indices."""
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


@functools.cache
def _dtypes() -> list[torch.dtype]:
    """Every dtype of torch that a plain tensor can have."""
    found = set()
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            try:
                torch.zeros(2, dtype=torch.uint8).repeat(value.itemsize).view(value)[::2].clone()
            except (RuntimeError, NotImplementedError, TypeError):
                continue
            found.add(value)
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    return sorted(found - quantized, key=str)


def _noise(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits at all: NaNs of every payload, negative zeros; only a bool must be 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def _zoo(rank: int, *, same_strides: bool = True) -> dict[str, torch.Tensor]:
    zoo: dict[str, torch.Tensor] = {}
    for number, dtype in enumerate(_dtypes()):
        seed = 1000 * rank + number
        zoo[f"{dtype} ()"] = _noise(dtype, (1,), seed)[0].clone()
        zoo[f"{dtype} (0, 4)"] = _noise(dtype, (0, 4), seed)
        zoo[f"{dtype} transposed"] = _noise(dtype, (5, 3), seed).t()
        zoo[f"{dtype} every other"] = _noise(dtype, (3, 8), seed)[:, ::2]
        zoo[f"{dtype} channels_last"] = _noise(dtype, (2, 3, 4, 2), seed).permute(0, 3, 1, 2)
        zoo[f"{dtype} plain"] = _noise(dtype, (7,), seed)
    big = torch.channels_last if same_strides or rank == 0 else torch.contiguous_format
    zoo["big"] = _noise(torch.float32, (1 << 19,), rank)
    zoo["big channels_last"] = _noise(torch.float32, (4, 64, 64, 64), rank).to(memory_format=big)
    zoo["frozen"] = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
    zoo["parameter"] = nn.Parameter(torch.full((3,), float(rank)))
    zoo["expanded"] = torch.full((1, 3), float(rank)).expand(4, 3)
    zoo["conjugate"] = torch.complex(torch.tensor([1.0 + rank]), torch.tensor([2.0])).conj()
    zoo["negative"] = torch.complex(torch.tensor([1.0]), torch.tensor([2.0 + rank])).conj().imag
    with torch.inference_mode():
        zoo["inference"] = torch.full((3,), float(rank))
    return zoo


def _replicate_zoo(ctx: RankContext, same_strides: bool, root: int) -> list[str]:
    zoo = _zoo(ctx.rank, same_strides=same_strides)
    wanted = {name: bits(tensor) for name, tensor in _zoo(root, same_strides=same_strides).items()}
    before = {
        name: (t.stride(), t.data_ptr(), 0 if t.is_inference() else t._version) for name, t in zoo.items()
    }
    with job(ctx) as here:
        here.tensors(list(zoo.values()), root)
    after = {
        name: (t.stride(), t.data_ptr(), 0 if t.is_inference() else t._version) for name, t in zoo.items()
    }
    wrong = [f"bits of {name}" for name, tensor in zoo.items() if bits(tensor) != wanted[name]]
    return wrong + [
        f"{name}: {before[name]} became {after[name]}" for name in zoo if before[name] != after[name]
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("same_strides", [True, False])
def test_every_dtype_and_layout_arrives_bit_for_bit_in_place(
    pools: Pools, world_size: int, same_strides: bool
) -> None:
    root = world_size - 1 if same_strides else 0
    assert run(pools(world_size), _replicate_zoo, same_strides, root) == [[]] * world_size


def test_the_zoo_holds_the_unusual() -> None:
    assert {torch.bool, torch.uint64, torch.float8_e5m2, torch.bfloat16, torch.complex128} <= set(_dtypes())
    assert {torch.complex32, torch.int16} <= set(_dtypes())


def _count_collectives(ctx: RankContext) -> tuple[int, int, bool]:
    small = [torch.full((5,), float(ctx.rank * i)) for i in range(5000)]
    large = [torch.full((1 << 19,), float(ctx.rank)) for _ in range(3)]
    with job(ctx) as here:
        replicator = TensorReplicator([*small, *large], here.comm, here.device)
        counted = _Counting(here.comm)
        sent = counted.sent
        replicator.pack()
        replicator.queue(counted, here.comm.lanes[0])  # type: ignore[arg-type]
        replicator.wait()
        replicator.unpack()
    memory = {tensor.data_ptr() for tensor in large}
    return len(sent), len(memory & set(sent)), all(not t.any() for t in [*small, *large])


class _Counting:
    """A communicator that notes what it broadcasts."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sent: list[int] = []

    def broadcast_(self, t: torch.Tensor, root: int = 0, *, stream: Any = None) -> Any:
        self.sent.append(t.data_ptr())
        return self.comm.broadcast_(t, root, stream=stream)


def test_small_tensors_share_a_collective_and_large_ones_are_sent_from_where_they_are(pools: Pools) -> None:
    assert run(pools(2), _count_collectives) == [(4, 3, True)] * 2


def _more_than_a_parcel(ctx: RankContext) -> bool:
    tensors = [torch.full((200_000,), float(ctx.rank + i)) for i in range(50)]  # 40 MB in pieces of 0.8 MB
    with job(ctx) as here:
        here.tensors(tensors)
    return all(bool((t == i).all()) for i, t in enumerate(tensors))


def test_more_than_fits_in_a_parcel(pools: Pools) -> None:
    assert run(pools(2), _more_than_a_parcel) == [True, True]


def _buffers_between_forwards(ctx: RankContext) -> list[Any]:
    """Cases B45 (i): two forwards that save the buffer, then one backward."""
    weight = nn.Parameter(torch.ones(2, 2))
    buffer = torch.ones(2) * (ctx.rank + 1)
    with job(ctx) as here:
        replicator = TensorReplicator([buffer], here.comm, here.device)
        outputs = []
        for _ in range(2):
            replicator.pack([buffer])
            replicator.queue(here.comm, here.comm.lanes[0])
            replicator.wait()
            replicator.unpack()
            outputs.append((torch.ones(1, 2) @ weight) * buffer)
        (outputs[0] + outputs[1]).sum().backward()
        assert weight.grad is not None
        first = weight.grad.tolist()
        buffer.data = torch.full((2,), 5.0 + ctx.rank)  # swapped under it
        other = torch.full((3,), 7.0 + ctx.rank)  # replaced
        for tensors in (None, [buffer, other]):
            replicator.pack(tensors)
            replicator.queue(here.comm, here.comm.lanes[0])
            replicator.wait()
            replicator.unpack()
        with torch.inference_mode():
            replicator.pack()
            replicator.unpack()
        return [first, buffer.tolist(), other.tolist()]


def test_buffers_between_two_forwards_and_a_backward(pools: Pools) -> None:
    expected = [[[2.0, 2.0], [2.0, 2.0]], [5.0, 5.0], [7.0, 7.0, 7.0]]
    assert run(pools(2), _buffers_between_forwards) == [expected] * 2


class _Everything(nn.Module):
    """Cases B45 (iii)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name, value in {
            "flag": torch.tensor(rank == 0),
            "count": torch.tensor(7 + rank),
            "raw": torch.full((3,), rank, dtype=torch.uint8),
            "empty": torch.empty(0),
            "lower": torch.full((2,), rank + 0.5, dtype=torch.bfloat16),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("hidden", torch.full((2,), float(rank)), persistent=False)
        self.norm = nn.BatchNorm1d(2)
        self.norm(torch.randn(4, 2) + rank)


def _replicate_buffers(ctx: RankContext) -> list[Any]:
    torch.manual_seed(ctx.rank)
    module = _Everything(ctx.rank)
    with job(ctx) as here:
        here.tensors(list(module.buffers()))
    return [(name, buffer.dtype, bits(buffer)) for name, buffer in module.named_buffers()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_b45_buffers_of_every_kind(pools: Pools, world_size: int) -> None:
    first, *others = run(pools(world_size), _replicate_buffers)
    assert {name: data for name, _, data in first}["count"] == bits(torch.tensor(7))
    assert others == [first] * (world_size - 1)


def _replicate_what_has_no_bytes(ctx: RankContext) -> list[str]:
    plain = torch.full((2,), float(ctx.rank))
    texts = []
    with job(ctx) as here:
        for odd in (
            torch.ones(2).to_sparse(),
            torch.ones(2, device="meta"),
            nn.parameter.UninitializedBuffer(),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        ):
            for call in (here.tensors, lambda tensors: TensorReplicator(tensors, here.comm, here.device)):
                with pytest.raises(UsageError, match="tensor 1 can't be made equal") as caught:
                    call([plain, odd])
                texts.append(str(caught.value))
    assert plain.tolist() == [ctx.rank] * 2  # nothing had moved
    return texts


def test_tensors_without_bytes_are_refused_before_anything_moves(pools: Pools) -> None:
    texts = run(pools(2), _replicate_what_has_no_bytes)
    assert texts[0] == texts[1]
    assert all(any(word in text for text in texts[0]) for word in ("sparse", "meta", "lazy", "quantized"))
