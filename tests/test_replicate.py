"""Tensors and optimizers made equal to rank 0's: bits, identity, layout, versions; errors on every rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from tests.ranks import RankContext, RankPool, rank_pools
from torch import nn

import bagua_rt as bagua
from bagua_rt.backend import Communicator, Device
from bagua_rt.control import Control
from bagua_rt.errors import LayoutMismatchError, UsageError
from bagua_rt.replicate import TensorReplicator, replicate_optimizers, replicate_tensors

pools = pytest.fixture(scope="module")(rank_pools)
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


# --------------------------------------------------------------------------------------------------- tensors


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
            "half": torch.full((2,), rank + 0.5, dtype=torch.bfloat16),
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


# ------------------------------------------------------------------------------------------------ optimizers


@dataclass(frozen=True)
class Setting:
    kind: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{key}={value}" for key, value in self.options)])

    def make(self, params: Any, lr: float) -> torch.optim.Optimizer:
        options = dict(self.options)
        if options.pop("tensor_lr", False):
            return getattr(torch.optim, self.kind)(params, lr=torch.tensor(lr), **options)  # type: ignore[no-any-return]
        return getattr(torch.optim, self.kind)(params, lr=lr, **options)  # type: ignore[no-any-return]


def _kinds() -> dict[str, Any]:
    found = inspect.getmembers(torch.optim, inspect.isclass)
    return {n: c for n, c in found if issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}


@functools.cache  # not at import: the ranks import this, too
def _settings() -> list[Setting]:
    """Each class with each implementation that steps on a CPU, and what gives it more state."""
    candidates = {
        "foreach": True,
        "fused": True,
        "capturable": True,
        "amsgrad": True,
        "centered": True,
        "momentum": 0.9,
        "line_search_fn": "strong_wolfe",
    }
    settings = []
    for kind, cls in _kinds().items():
        known = inspect.signature(cls).parameters
        options = [(), *(((key, value),) for key, value in candidates.items() if key in known)]
        options += [(("foreach", True), ("tensor_lr", True))] if kind == "Adam" else []
        options += [(("tensor_lr", True),)]
        settings += [setting for extra in options if _steps(setting := Setting(kind, extra))]
    return settings


def _steps(setting: Setting) -> bool:
    """Can this be stepped on a CPU at all? (capturable and a tensor lr not always)"""
    param = nn.Parameter(torch.ones(2, 2))
    try:
        optimizer = setting.make([param], 0.1)
        param.grad = torch.ones(2, 2).to_sparse() if setting.kind == "SparseAdam" else torch.ones(2, 2)
        optimizer.step(lambda: torch.tensor(1.0))  # type: ignore[arg-type, return-value]
    except (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError):
        return False
    return True


def _params(setting: Setting) -> list[nn.Parameter]:
    """Two dimensions throughout: Muon takes nothing else. The second is frozen, the third transposed."""
    torch.manual_seed(3)
    shapes = [(3, 4), (2, 2), (4, 5), (1, 1)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    params[1].requires_grad_(False)
    params[2] = nn.Parameter(torch.randn(5, 4).t())
    return params


def _groups(setting: Setting, params: list[nn.Parameter]) -> Any:
    return params if setting.kind == "LBFGS" else [{"params": params[:2]}, {"params": params[2:]}]


def _train(
    setting: Setting, params: list[nn.Parameter], optimizer: torch.optim.Optimizer, seeds: range
) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(param.shape, generator=generator) for param in params]

        def closure(grads: list[torch.Tensor] = grads) -> torch.Tensor:
            for param, grad in zip(params, grads, strict=True):
                if param.requires_grad:
                    param.grad = (
                        grad.to_sparse() if setting.kind == "SparseAdam" else grad + 0.1 * param.detach()
                    )
            return torch.stack([(param.detach() ** 2).sum() for param in params]).sum()

        if setting.kind == "LBFGS":
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()


def _described(value: Any) -> Any:
    """A state as plain values: tensors by dtype, device, shape, strides and bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.device), tuple(value.shape), value.stride(), bits(value))
    if isinstance(value, dict):
        return {key: _described(part) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *map(_described, value)]
    return repr(value)


def _start_optimizer(ctx: RankContext, setting: Setting, others: str) -> dict[str, Any]:
    params = _params(setting)
    is_first = ctx.rank == 0
    optimizer = setting.make(_groups(setting, params), 0.05 if is_first else 0.2)
    if is_first:
        _train(setting, params, optimizer, range(3))
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.05
    elif others == "trained":
        _train(setting, params, optimizer, range(10, 12))
        optimizer.state[params[1]] = {"junk": torch.ones(2)}
        optimizer.param_groups[0]["junk"] = 1
    weights_before = [bits(param) for param in params]
    lrs = [group["lr"] for group in optimizer.param_groups]
    held = {
        (i, key): value for i, p in enumerate(params) for key, value in optimizer.state.get(p, {}).items()
    }
    with job(ctx) as here:
        here.optimizers(optimizer)
        weights_kept = weights_before == [bits(param) for param in params]
        here.tensors(list(params))
    kept = {
        (i, key): optimizer.state[p][key] is held[i, key]
        for i, p in enumerate(params)
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor) and isinstance(held.get((i, key)), torch.Tensor)
    }
    same_lr = [
        not isinstance(lr, torch.Tensor) or group["lr"] is lr
        for lr, group in zip(lrs, optimizer.param_groups, strict=True)
    ]
    start = _described(optimizer.state_dict())
    lr_now = [float(group["lr"]) for group in optimizer.param_groups]
    _train(setting, params, optimizer, range(5, 6))
    return {
        "weights_kept": weights_kept,
        "same_params": all(p.data_ptr() for p in params),
        "same_lr": all(same_lr),
        "kept": kept,
        "start": start,
        "lr": lr_now,
        "end": [bits(p) for p in params],
        "state_end": _described(optimizer.state_dict()),
    }


def _alone(setting: Setting) -> tuple[Any, list[bytes]]:
    """What rank 0 does, by an optimizer that no other rank has touched."""
    params = _params(setting)
    optimizer = setting.make(_groups(setting, params), 0.05)
    _train(setting, params, optimizer, range(3))
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.05
    start = _described(copy.deepcopy(optimizer.state_dict()))
    _train(setting, params, optimizer, range(5, 6))
    return start, [bits(p) for p in params]


def _start_all(ctx: RankContext, settings: list[Setting], others: str) -> list[tuple[Any, ...]]:
    """All in one call: the ranks are started once."""
    return [(_start_optimizer(ctx, each, others), _alone(each)) for each in settings]


@pytest.mark.parametrize("others", ["fresh", "trained"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_goes_on_as_rank_0s_would_have(pools: Pools, world_size: int, others: str) -> None:
    chosen = _settings() if world_size == 2 else [s for s in _settings() if not s.options]
    answers = run(pools(world_size), _start_all, chosen, others)
    for number, setting in enumerate(chosen):
        for rank in range(world_size):
            found, (start, end) = answers[rank][number]
            where = f"{setting} on rank {rank}"
            assert found["weights_kept"], where
            assert found["start"] == start, where
            assert found["lr"] == pytest.approx([0.05] * len(found["lr"])), where
            assert found["same_lr"], where
            assert found["end"] == end, where
            assert found["state_end"] == answers[0][number][0]["state_end"], where
            if setting.kind != "LBFGS":
                assert all(found["kept"].values()), (where, found["kept"])


def test_every_class_of_torch_is_among_them() -> None:
    assert {setting.kind for setting in _settings()} == set(_kinds())
    assert any("fused" in str(setting) for setting in _settings())
    assert any("tensor_lr" in str(setting) for setting in _settings())


def _b46(ctx: RankContext) -> tuple[Any, Any, Any]:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)]
    adam = torch.optim.Adam(params, lr=0.05 if ctx.rank == 0 else 0.1)
    other = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([other], lr=0.05 if ctx.rank == 0 else 0.3)
    if ctx.rank == 0:
        trained = torch.optim.Adam(params, lr=0.05)
        for _ in range(3):
            params[0].grad = torch.ones(3)
            trained.step()
        adam.load_state_dict(trained.state_dict())
    with job(ctx) as here:
        here.tensors([*params, other])
        here.optimizers(adam, plain)
    step = adam.state[params[0]]["step"]
    assert (step.dtype, step.device.type, step.shape, float(step)) == (torch.float32, "cpu", (), 3.0)
    assert params[1] not in adam.state
    assert plain.state_dict()["state"] == {}
    start = _described([adam.state_dict(), plain.state_dict()])
    params[0].grad, other.grad = torch.full((3,), 1.5), torch.full((2,), 1.5)
    adam.step()
    plain.step()
    return start, [bits(p) for p in [*params, other]], adam.param_groups[0]["lr"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_b46_adam_from_a_checkpoint_on_rank_0(pools: Pools, world_size: int) -> None:
    first, *others = run(pools(world_size), _b46)
    assert first[2] == 0.05
    assert others == [first] * (world_size - 1)


class Point(NamedTuple):
    at: torch.Tensor
    name: str


class Shadow:
    """An object that only pickle can look into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unusual(ctx: RankContext) -> list[Any]:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    state: dict[Any, Any] = optimizer.state
    mine = float(ctx.rank)
    if ctx.rank == 0:
        shared = torch.full((2,), 8.0)
        state[first] = OrderedDict(
            a=[torch.tensor(1.0), torch.tensor([2.0])],
            b=deque([torch.tensor(3), 4], maxlen=5),
            c=Point(torch.tensor(5.0), "five"),
            d={"deep": {"er": (torch.tensor([True]), None)}},
            e=shared,
            f=shared,
            g=Shadow(shared),
            h=second,
            i=nn.Parameter(torch.ones(1), requires_grad=False),
            j=torch.empty(0, 3),
            k=first.detach(),
            l=torch.float64,
        )
        state[second] = {}
        state["global"] = {"seen": torch.tensor(6)}
        optimizer.param_groups[0].update(betas=(torch.tensor(0.9), 0.99), tuning=None)
    elif ctx.rank == 1:
        state[first] = {"a": [torch.tensor(mine)], "e": torch.full((2,), mine), "k": first.data, "f": first}
        state[second] = {"x": torch.ones(2)}
        state["global"] = {"seen": torch.tensor(0)}
        state["other"] = 1
    seen = state["global"]["seen"] if ctx.rank == 1 else None
    own_a = state[first]["a"][0] if ctx.rank == 1 else None
    with job(ctx) as here:
        here.optimizers(optimizer)
    found = state[first]
    assert found["e"] is found["f"]
    assert bits(found["g"].tensor) == bits(found["e"])
    assert found["h"] is second
    assert type(found["i"]) is nn.Parameter
    assert found["b"].maxlen == 5
    assert type(found["c"]) is Point
    assert list(found) == list("abcdefghijkl")
    if ctx.rank == 1:
        assert state["global"]["seen"] is seen
        assert found["a"][0] is own_a
        assert found["k"].data_ptr() != first.data_ptr()  # the weights are not the state's to write to
    assert first.tolist() == second.tolist() == [0.0, 0.0]
    names = {first: "first", second: "second"}
    return [
        _described({names.get(k, k): {**v, "g": 0} if k is first else v for k, v in state.items()}),
        _described(optimizer.param_groups),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_unusual_state_keeps_its_structure_and_its_sharing(pools: Pools, world_size: int) -> None:
    first, *others = run(pools(world_size), _unusual)
    assert others == [first] * (world_size - 1)


def _mismatch(ctx: RankContext, case: str) -> str:
    odd = ctx.rank == 1
    params = [nn.Parameter(torch.full((2,), float(ctx.rank))) for _ in range(3)]
    tail = {"parameters": params[1:2], "groups": params[1:]}.get(case, params[1:]) if odd else params[1:]
    kind: Any = torch.optim.AdamW if odd and case == "class" else torch.optim.Adam
    if odd and case == "shape":
        params[2] = nn.Parameter(torch.zeros(3))
        tail = params[1:]
    groups = [{"params": params[:1]}, {"params": tail}]
    if odd and case == "groups":
        groups = [{"params": params}]
    optimizers = [
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
        kind(groups, lr=0.1 * (ctx.rank + 1)),
    ]
    names = {param: f"layer{i}" for i, param in enumerate(params)}
    if odd and case == "names":
        names = {param: f"layer{2 - i}" for i, param in enumerate(params)}
    with job(ctx) as here:
        with pytest.raises(LayoutMismatchError) as caught:
            here.optimizers(*(optimizers[:1] if odd and case == "optimizers" else optimizers), names=names)
        assert optimizers[1].param_groups[0]["lr"] == 0.1 * (ctx.rank + 1)
        here.control.agree("still in step")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("optimizers", ["the number of optimizers", "1 on rank 1"]),
        ("class", ["the class of optimizer 1", "AdamW on rank 1"]),
        ("groups", ["the number of parameter groups of optimizer 1 (Adam)", "1 on rank 1"]),
        ("parameters", ["the number of parameters in group 1 of optimizer 1 (Adam)", "1 on rank 1"]),
        ("shape", ["parameter 1 in group 1 of optimizer 1 (Adam)", "layer2 torch.float32 [3] on rank 1"]),
        ("names", ["parameter 0 in group 0 of optimizer 1 (Adam)", "layer2 torch.float32 [2] on rank 1"]),
    ],
)
def test_differing_optimizers_are_an_error_on_every_rank(pools: Pools, case: str, texts: list[str]) -> None:
    errors = run(pools(3), _mismatch, case)
    assert errors[1:] == errors[:1] * 2
    for text in [*texts, "differs on rank 1 ·", "as on ranks 0, 2"]:
        assert text in errors[0]


def _unsendable(ctx: RankContext, what: str) -> str:
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.1 * (ctx.rank + 1))
    state: dict[Any, Any] = optimizer.state
    if ctx.rank == 0:
        if what == "function":
            state[param] = {"fine": 1, "schedule": lambda step: step}
        elif what == "sparse":
            state[param] = {"fine": torch.ones(1), "schedule": torch.ones(2).to_sparse()}
        elif what == "group":
            optimizer.param_groups[0]["schedule"] = iter(lambda: 0, 1)
        else:
            state[param] = {"schedule": Unreadable()}
    with job(ctx) as here:
        with pytest.raises(UsageError) as caught:
            here.optimizers(optimizer)
        here.control.agree("still in step")
    assert optimizer.param_groups[0]["lr"] == 0.1 * (ctx.rank + 1)
    return str(caught.value)


def _refuse() -> None:
    raise ImportError("no such extension here")


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


@pytest.mark.parametrize("what", ["function", "sparse", "group", "unreadable"])
def test_state_that_cannot_travel_is_an_error_on_every_rank(pools: Pools, what: str) -> None:
    errors = run(pools(3), _unsendable, what)
    assert errors[1:] == errors[:1] * 2
    expected = (
        ["ranks 1, 2 can't take up", "no such extension here"]
        if what == "unreadable"
        else ["rank 0 has optimizer state that can't be sent", "optimizer 0 (SGD)", "'schedule'"]
    )
    for text in expected:
        assert text in errors[0]
