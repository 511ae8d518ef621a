"""Fifty switches through all algorithms: they leave no hook, thread, buffer or file descriptor behind."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import bagua_rt as bagua
from tests import zoo
from tests.micro import group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import Trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "async_model_average": {"interval_s": 0.0},
    "bytegrad": {"hierarchical": True},
    "decentralized": {"peers": "shift_one"},
    "fourbit": {},
    "gradient_allreduce": {},
    "local_sgd": {"interval": 1, "outer_step": True, "average_state": ("exp_avg",)},
    "low_precision_decentralized": {},
    "onebit_adam": {},
    "powersgd": {"rank": 1, "hierarchical": True},
    "qadam": {},
}

DIFFERENT = ("async_model_average", "decentralized", "local_sgd", "low_precision_decentralized")  # on purpose


def hooks(trainer: Trainer) -> list[int]:
    optimizer, model = trainer.optimizer, trainer.model
    params = [
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters()
    ]
    modules = [
        len(each)
        for module in model.modules()
        for each in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    ]
    steps = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    return [*params, *modules, *steps, len(_global_optimizer_post_hooks)]


def left() -> dict[str, int]:
    """What a process holds: bytes of tensors, threads, file descriptors."""
    gc.collect()
    # No subclasses: what torch.compile has left in this process has no memory.
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    # A client of the store has its thread from its first question on, which one may ask late.
    threads = [thread for thread in threading.enumerate() if thread.name != "bagua_rt-store"]
    descriptors = list(Path("/proc/self/fd").iterdir())
    return {"bytes": sum(storages.values()), "threads": len(threads), "descriptors": len(descriptors)}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return bagua.optim.OneBitAdam(model.parameters(), 0.01, eps=1e-2, warmup_steps=3)


def switched(ctx: RankContext) -> tuple[list[dict[str, int]], list[list[int]]]:
    """What is there after each time through all of them; all hooks, then, and after the end."""
    found, seen = [], []
    with group(ctx, **zoo.nodes(ctx)):
        trainer = Trainer(bagua.GradientAllReduce(), adam, torch.float32, cap_mb=2**-12)
        for t in range(5):
            for name, settings in SETTINGS.items():
                trainer.run.switch(bagua.algorithms.create(name, **settings))
                assert trainer.run.bit_equal is (name not in DIFFERENT), name
                for _ in range(2):
                    trainer.step(ctx.rank, t, 3)
            found.append(left())
            seen.append(hooks(trainer))
        trainer.run.close()
        trainer.optimizer.zero_grad()
        seen.append(hooks(trainer))
    return found, seen


def test_fifty_switches_leave_nothing_behind(pool: RankPool) -> None:
    assert set(SETTINGS) <= set(bagua.algorithms.names())
    for found, seen in on(pool, 3, switched):
        for key, allowed in (("bytes", 0), ("threads", 0), ("descriptors", 4)):  # the store's come and go
            counts = [each[key] for each in found]
            assert max(counts[2:]) <= counts[1] + allowed, f"{key}: {counts}"
        assert seen[:5] == seen[:1] * 5
        assert not any(seen[5])
