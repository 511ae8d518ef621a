"""What trainers do to gradients, to their memory and layout, and to parameters while a graph is alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import SIZES, One, Two, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool


def images(ctx: RankContext, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch, and the whole."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(2 * ctx.world_size, 3, 6, 6, generator=generator)
    return whole.chunk(ctx.world_size)[ctx.rank], whole


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


# ---- the memory and the layout of gradients


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def assign_data(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data = param.grad.data.clamp(-0.05, 0.05)


def swap(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES = {"channels_last": to_channels_last, "data": assign_data, "swapped": swap}


def moved(ctx: RankContext, how: str) -> float:
    """The largest difference to one process on the whole batch, after a change amid the steps."""
    with group(ctx):
        model, alone = convolutions(), convolutions()
        pairs = [(each, torch.optim.Adam(each.parameters(), 0.01, fused=True)) for each in (model, alone)]
        run = bagua.attach(model, pairs[0][1])
        for step in range(5):
            for (each, optimizer), x in zip(pairs, images(ctx, step), strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                each(x).square().mean().backward()
                if step == 2:
                    CHANGES[how](each)
                optimizer.step()
                if step == 3:
                    optimizer.zero_grad()
                    CHANGES[how](each)
        run.close()
        both = zip(model.parameters(), alone.parameters(), strict=True)
        return max(float((one - other).abs().max()) for one, other in both)


@pytest.mark.parametrize("how", list(CHANGES))
def test_gradients_that_get_other_memory_or_strides_are_averaged_all_the_same(
    pool: RankPool, how: str
) -> None:
    assert max(on(pool, 2, moved, how)) < 1e-4  # Adam's division makes 1e-7 in a gradient 1e-5 of a step


def laid_out_alone(ctx: RankContext) -> tuple[str, str]:
    with group(ctx):
        model = convolutions()
        run = bagua.attach(model)
        for step in range(2):
            model(images(ctx, step)[0]).mean().backward()
        if ctx.rank == 1:
            to_channels_last(model)
        found = caught(lambda: model(images(ctx, 2)[0]).mean().backward())
        run.close()
        return found


def test_a_layout_that_one_rank_changes_is_an_error_on_all(pool: RankPool) -> None:
    for kind, text in on(pool, 2, laid_out_alone):
        assert kind == "LayoutMismatchError"
        assert "'0.weight'" in text
        assert "on rank 1" in text


def of_another_dtype(ctx: RankContext) -> tuple[str, str]:
    with group(ctx):
        model = One().bfloat16()
        model.a.weight.grad_dtype = torch.float32
        return caught(lambda: bagua.attach(model))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_of_another_dtype_are_refused_by_name(pool: RankPool) -> None:
    for kind, text in on(pool, 2, of_another_dtype):
        assert kind == "UsageError"
        assert "'a.weight'" in text
        assert "torch.float32" in text


# ---- parameters that are frozen while a graph is alive


def frozen_between(ctx: RankContext, how: str) -> list[Any]:
    """`b` is frozen after its forward, or after it has gathered gradients that are this rank's own."""
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = wrap("attach", model, optimizer).run
        if how == "local":
            with run.no_sync():
                model(feed(ctx)).sum().backward()
            model.a.weight.grad = None
            model.b.requires_grad_(False)
        loss = model(feed(ctx)).sum()
        model.b.requires_grad_(False)
        loss.backward()
        gradients = [grad(model.a.weight), grad(model.b.weight)]
        refused = caught(optimizer.step)
        optimizer.zero_grad()
        model.b.requires_grad_(True)
        model(feed(ctx)).sum().backward()
        optimizer.step()
        return [*gradients, refused, grad(model.a.weight), grad(model.b.weight)]


@pytest.mark.parametrize("world_size", SIZES)
def test_a_parameter_frozen_after_its_forward_gets_nothing(pool: RankPool, world_size: int) -> None:
    right = mean(world_size)
    wanted = [right, None, ("", ""), right, right]
    assert on(pool, world_size, frozen_between, "forward") == [wanted] * world_size


def test_a_step_by_local_gradients_of_a_frozen_parameter_is_refused(pool: RankPool) -> None:
    for rank, found in enumerate(on(pool, 2, frozen_between, "local")):
        averaged, local, (kind, text), *after = found
        assert (averaged, local) == (1.5, rank + 1.0)
        assert kind == "UsageError"
        assert "b.weight" in text
        assert "a.weight" not in text
        assert after == [1.5, 1.5]


# ---- calls inside of a backward


def call_inside(ctx: RankContext, what: str) -> list[Any]:
    with group(ctx, timeout_s=20.0):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = bagua.attach(model, optimizer)
        state = run.state_dict()
        calls = {
            "attach": lambda: bagua.attach(model, optimizer),
            "switch": lambda: run.switch(bagua.GradientAllReduce()),
            "load_state_dict": lambda: run.load_state_dict(state),
            "state_dict": run.state_dict,
            "autotune": run.autotune,
            "join": lambda: run.join().__enter__(),
            "close": run.close,
        }
        out = model(feed(ctx))
        model.b.weight.register_post_accumulate_grad_hook(lambda _: calls[what]() and None)
        found = caught(out.sum().backward)
        model.b.weight._post_accumulate_grad_hooks.popitem()
        refused = caught(optimizer.step)
        if what != "close":
            optimizer.zero_grad()
            model(feed(ctx)).sum().backward()
            optimizer.step()
        return [*found, refused[0], grad(model.a.weight)]


@pytest.mark.parametrize("what", ["attach", "switch", "load_state_dict", "state_dict", "autotune", "join"])
def test_what_communicates_is_refused_inside_of_a_backward(pool: RankPool, what: str) -> None:
    for kind, text, refused, after in on(pool, 2, call_inside, what):
        assert (kind, refused) == ("UsageError", "UsageError")
        assert f"{what}() inside of a backward" in text
        assert after == 1.5


def test_close_inside_of_a_backward_ends_that_backward(pool: RankPool) -> None:
    for kind, text, *_ in on(pool, 2, call_inside, "close"):
        assert kind == "ClosedError"
        assert "while a backward ran" in text
