"""A checkpoint in a world of another size: what holds in any world goes on, and the log says what doesn't."""

from __future__ import annotations

import io
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, Trainer

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "fourbit": {},
    "powersgd": {"rank": 1},
    "decentralized": {"peers": "shift_one"},
    "low_precision_decentralized": {},
    "local_sgd": {"interval": 2, "outer_step": True},
    "async_model_average": {"interval_s": 1e5, "warmup_steps": 2},
    "onebit_adam": {},
    "qadam": {},
}
ANEW = {
    "fourbit": "the errors",
    "powersgd": "the errors",
    "onebit_adam": "the errors",
    "qadam": "the errors",
    "low_precision_decentralized": "the replicas of the neighbours, in the next round",
}

EQUAL = ("gradient_allreduce", "bytegrad", "fourbit", "powersgd", "onebit_adam", "qadam")  # after each step


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name in ("onebit_adam", "qadam"):
        kind = bagua.optim.OneBitAdam if name == "onebit_adam" else bagua.optim.QAdam
        return kind(model.parameters(), lr=0.01, eps=1e-2, warmup_steps=2)
    return torch.optim.SGD(model.parameters(), LR)


def trainer_of(name: str) -> Trainer:
    algorithm = bagua.algorithms.create(name, **SETTINGS[name])
    return Trainer(algorithm, partial(optimizer_of, name), torch.float32, cap_mb=2**-12)


def saved(ctx: RankContext) -> dict[str, bytes]:
    """This rank's checkpoints, by algorithm."""
    files = {}
    with group(ctx):
        for name in SETTINGS:
            trainer, file = trainer_of(name), io.BytesIO()
            for t in range(STEPS):
                trainer.step(ctx.rank, t, 5)
            run = trainer.run.state_dict()
            torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict(), run], file)
            trainer.run.close()
            files[name] = file.getvalue()
    return files


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def loaded(ctx: RankContext, files: list[dict[str, bytes]]) -> dict[str, Any]:
    """What was logged, the state before and after, and the weights of a step."""
    found = {}
    log, lines = logging.getLogger("bagua_rt"), _Lines()
    log.addHandler(lines)
    try:
        with group(ctx):
            for name in SETTINGS:
                # A rank that is new takes another one's file.
                parts = torch.load(io.BytesIO(files[min(ctx.rank, len(files) - 1)][name]), weights_only=False)
                trainer = trainer_of(name)
                for t in range(STEPS):  # what it keeps until now ends
                    trainer.step(ctx.rank, t, 6)
                trainer.model.load_state_dict(parts[0])
                trainer.optimizer.load_state_dict(parts[1])
                trainer.run.load_state_dict(parts[2])
                now = trainer.run.state_dict()
                assert now["generations"] == parts[2]["generations"]
                texts, lines.texts = lines.texts, []
                trainer.step(ctx.rank, STEPS, 5)
                mode = trainer.run._attachment.engine.state.launch_on.name
                trainer.run.close()
                found[name] = (texts, parts[2]["state"], now["state"], mode, trainer.bits())
    finally:
        log.removeHandler(lines)
    return found


def check(name: str, before: dict[str, Any], after: dict[str, Any], mode: str) -> None:
    """What the algorithm's state was in the checkpoint, and what has become of it."""
    if name == "decentralized":
        assert after["round"] == before["round"] == STEPS
    elif name == "low_precision_decentralized":
        assert not after["is_synchronised"]
    elif name == "local_sgd":
        for part in ("anchor", "momentum"):
            assert any(value.any() for value in before[part].values())
            assert all(torch.equal(after[part][key], value) for key, value in before[part].items())
    elif name == "powersgd":
        assert all(torch.equal(query, before["query"][key]) for key, query in after["query"].items())
        assert not any(error.any() for error in after["error"].values())
    elif name == "async_model_average":
        assert mode == "TIMER", "the warm-up was over"
    else:
        assert not any(part.any() for pair in after.get("errors", ()) for part in pair)


@pytest.mark.parametrize(("former", "now"), [(3, 2), (2, 3), (2, 1)])
def test_what_holds_in_any_world_goes_on_and_the_rest_is_named(pool: RankPool, former: int, now: int) -> None:
    answers = on(pool, now, loaded, on(pool, former, saved))
    start = f"the checkpoint is of a world of {former} ranks, and this is one of {now}: "
    for found in answers:
        for name in SETTINGS:
            texts, before, after, mode, bits = found[name]
            assert texts == [f"{start}{ANEW.get(name, 'nothing')} of {name} starts anew"]
            check(name, before, after, mode)
            if name in EQUAL:
                assert bits == answers[0][name][-1], name
