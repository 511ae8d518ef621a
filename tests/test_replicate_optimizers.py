"""Optimizers made equal to rank 0's: every class of torch, odd state, identity; errors on every rank."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bagua_rt.errors import LayoutMismatchError, UsageError
from tests.ranks import RankContext, RankPool
from tests.test_replicate import bits, job, run

Pools = Callable[[int], RankPool]


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
            assert all(found["kept"].values()), (where, found["kept"])
            if setting.kind == "Adam" and (others == "trained" or rank == 0):
                assert len(found["kept"]) >= 9, where  # three parameters with step, exp_avg, exp_avg_sq


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
