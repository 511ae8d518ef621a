"""Every algorithm on the CUDA backend over emulated libraries: as on gloo, and with nothing to report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import bagua_rt as bagua
from tests.emulator import product
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Bowl

STEPS = 4


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    variables: Mapping[str, str] = product.environment(base={})
    return variables


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return bagua.optim.QAdam(model.parameters(), lr=0.01, eps=1e-2, warmup_steps=2)
    if name == "onebit_adam":
        return bagua.optim.OneBitAdam(model.parameters(), lr=0.01, eps=1e-2, warmup_steps=2)
    return torch.optim.SGD(model.parameters(), LR, momentum=0.5)


@contextmanager
def compute_stream(backend: str, device: Any) -> Iterator[None]:
    """On the emulator, run the body's torch operations on the emulated compute stream."""
    if backend == "gloo":
        yield
        return
    with device.torch_side.on_compute_stream():
        yield


def train(ctx: RankContext, backend: str, name: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    if backend != "gloo":
        from tests.emulator import emulator

        product.install()
        emulator.reset()
    options: dict[str, Any] = {"timeout_s": 40.0, "local_world_size": (2, 2, 1)[ctx.rank]}
    options.update(store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size)
    with (
        bagua.init("cpu" if backend == "gloo" else f"cuda:{ctx.rank}", **options) as group,
        compute_stream(backend, group._job.backend.device),
    ):
        model = Bowl(torch.float32)
        optimizer = optimizer_of(name, model)
        algorithm = bagua.algorithms.create(name, **settings)
        run = bagua.attach(model, optimizer, algorithm, bucket_cap_mb=2**-10, first_bucket_mb=2**-10)
        for t in range(STEPS):
            optimizer.zero_grad()
            model(ctx.rank, t, seed).backward()
            optimizer.step()
            if name == "async_model_average" and t < STEPS - 1:
                run.pause()  # the only rounds there are, with such an interval
                run.resume()
        run.state_dict()  # completes the round that follows the last step
        device = group._job.backend.device
        device.synchronize(device.record(device.compute_stream()))  # a slow rank may be rounds behind
        run.close()
        weights = {key: model.get_parameter(key).detach().numpy().copy() for key in SHAPES}
    found: list[str] = []
    if backend != "gloo":
        from tests.emulator import emulator

        emulator.drain()
        found = emulator.reports()
        emulator.reset()
    return {"weights": weights, "reports": found}


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("async_model_average", {"interval_s": 1e5}),
    ("async_model_average", {"interval_s": 1e5, "warmup_steps": 2, "hierarchical": True}),
    ("bytegrad", {}),
    ("bytegrad", {"hierarchical": True}),
    ("fourbit", {}),
    ("local_sgd", {"interval": 2, "outer_step": True, "average_state": ("momentum_buffer",)}),
    ("low_precision_decentralized", {}),
    ("low_precision_decentralized", {"hierarchical": True}),
    ("onebit_adam", {}),
    ("powersgd", {}),
    ("qadam", {}),
)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_as_on_gloo(
    pool: RankPool, environment: Mapping[str, str], name: str, settings: dict[str, Any]
) -> None:
    seed = int(np.random.default_rng().integers(1, 10**6))
    right = pool.first(3).run(train, "gloo", name, settings, seed, timeout=90.0)
    emulated = RankPool(3, environment).run(train, "emulated", name, settings, seed, timeout=90.0)
    for ours, theirs in zip(emulated, right, strict=True):
        assert ours["reports"] == [], f"{seed=}"
        for key in SHAPES:
            np.testing.assert_allclose(
                ours["weights"][key],
                theirs["weights"][key],
                rtol=1e-3,
                atol=1e-3,
                err_msg=f"{key} {seed=}",
            )


def test_rounds_in_the_background_leave_nothing_to_report(
    pool: RankPool, environment: Mapping[str, str]
) -> None:
    seed = int(np.random.default_rng().integers(1, 10**6))
    settings = {"interval_s": 0.0}
    answers = RankPool(3, environment).run(
        train, "emulated", "async_model_average", settings, seed, timeout=90.0
    )
    for answer in answers:
        assert answer["reports"] == [], f"{seed=}"
        for key in SHAPES:
            np.testing.assert_array_equal(
                answer["weights"][key], answers[0]["weights"][key], f"{key} {seed=}"
            )
