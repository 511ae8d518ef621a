"""An episode, drawn from its seed: what trains, how, and what goes wrong meanwhile."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

BLOCKS = ("mlp", "conv", "norm", "scalar", "empty", "embedding", "giant", "tied", "strided")
BY_GRADIENT = ("mean", "sum", "hierarchical", "bytegrad", "paired")
BY_WEIGHT = ("decentralized", "shift_one", "local_sgd")
DEADLINE_S = 6.0  # where it will be waited for, and
PATIENCE_S = 60.0  # where not
EXACT = ("mean", "sum", "hierarchical")


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        kind: "kill"; "kill early", while the ranks still meet; "stop": it hangs for ever; "pause": it hangs,
            but comes back in time.
        victim: The rank.
        after_s: When, counted from the moment at which every rank trains; of "kill early", from the order.
        for_s: How long it pauses.
    """

    kind: str
    victim: int
    after_s: float
    for_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One episode.

    Attributes:
        seed: Everything else follows from it.
        world_size: Number of ranks.
        steps: Number of steps; with `joins` of the rank with the most data.
        blocks: The model's blocks, and the dtype of each.
        width: Their width.
        dtype: Of all that is not in a block.
        optimizer: Its name.
        algorithms: From which step on which algorithm runs.
        options: Arguments of attach().
        kind: "attach" or "ddp".
        lanes: Of the group.
        meets_by: "file" or "tcp".
        timeout_s: The deadline, on a machine that has nothing else to do.
        joins: Ranks have different numbers of batches.
        divides_by_initial: Of join().
        accumulates: Some backwards run under no_sync().
        clips: Gradients are clipped.
        scales: A GradScaler is used, and sometimes finds an inf.
        finds_unused: Blocks may go unused.
        sets_to_none: How gradients are zeroed.
        toggles: At which steps which blocks are frozen, or unfrozen.
        raises: At which steps which rank's backward raises, in the first or the last gradient's hook.
        checkpoints: At which steps run.state_dict() goes round.
        reattaches: At which steps the model is attached anew.
        faults: What happens in the first, second … life of the episode: survivors go on after a fault.
    """

    seed: int
    world_size: int
    steps: int
    blocks: tuple[tuple[str, str], ...]
    width: int
    dtype: str
    optimizer: str
    algorithms: tuple[tuple[int, str], ...]
    options: Mapping[str, Any]
    kind: str
    lanes: int
    meets_by: str
    timeout_s: float
    joins: bool = False
    divides_by_initial: bool = True
    accumulates: bool = False
    clips: bool = False
    scales: bool = False
    finds_unused: bool = False
    sets_to_none: bool = True
    toggles: Mapping[int, int] = field(default_factory=dict)
    raises: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    checkpoints: frozenset[int] = frozenset()
    reattaches: frozenset[int] = frozenset()
    faults: tuple[Fault, ...] = ()

    @property
    def keeps_ranks_equal(self) -> bool:
        """Do all ranks hold the same bits after each step?"""
        return all(name in BY_GRADIENT for _, name in self.algorithms)

    def steps_of(self, rank: int) -> int:
        """How many batches a rank has."""
        if not self.joins or rank == self.seed % self.world_size:
            return self.steps
        return random.Random(f"{self.seed}/{rank}/batches").randint(0, self.steps)

    def __str__(self) -> str:
        parts = [f"{self.world_size} ranks", self.kind, self.optimizer]
        parts += [name if step == 0 else f"{name} from {step}" for step, name in self.algorithms]
        flags = ("joins", "accumulates", "clips", "scales", "finds_unused")
        parts += [flag for flag in flags if getattr(self, flag)]
        for name, count in (("raises", len(self.raises)), ("reattaches", len(self.reattaches))):
            parts += [f"{count} {name}"] if count else []
        parts += [f"{fault.kind} rank {fault.victim} at {fault.after_s:.2f} s" for fault in self.faults]
        return ", ".join(parts)


def draw(seed: int) -> Plan:
    """The episode of a seed."""
    r = random.Random(seed)
    world_size = r.choice((1, 2, 2, 3, 3, 4))
    steps = r.randint(3, 16)
    joins = world_size > 1 and r.random() < 0.12
    algorithms = _algorithms(r, steps, joins)
    names = {name for _, name in algorithms}
    is_exact = names <= set(EXACT)
    optimizer = r.choice(("sgd", "momentum", "adam", "adamw", "onebit_adam")) if is_exact else "sgd"
    if optimizer == "onebit_adam":
        algorithms = ((0, "paired"),)
    scales = names == {"mean"} and optimizer != "onebit_adam" and not joins and r.random() < 0.2
    clips = is_exact and not scales and r.random() < 0.25
    faults = () if joins else _faults(r, world_size)
    can_raise = world_size > 1 and not joins and not scales and names <= set(BY_GRADIENT)
    plan = Plan(
        seed=seed,
        world_size=world_size,
        steps=steps,
        blocks=_blocks(
            r,
            # A norm over all gradients would carry the roundings of a coarse dtype to the others.
            may_mix=not clips and not joins and names <= set(BY_GRADIENT),
            may_be_sparse=is_exact and optimizer == "sgd" and not clips and not scales,
        ),
        width=r.choice((1, 3, 8, 33)),
        # Other ranks' replicas, and steps that a rank without data does not see, are only computed here, one
        # after the other; normalised batches of two amplify.
        dtype="float64" if joins or names & set(BY_WEIGHT) else r.choice(("float32", "float32", "float64")),
        optimizer=optimizer,
        algorithms=algorithms,
        options=_options(r, scales),
        kind=r.choice(("attach", "ddp")),
        lanes=r.randint(1, 3),
        meets_by=r.choice(("file", "tcp")),
        timeout_s=DEADLINE_S if {fault.kind for fault in faults} & {"stop", "kill early"} else PATIENCE_S,
        joins=joins,
        divides_by_initial=r.random() < 0.5,
        accumulates=r.random() < 0.35,
        clips=clips,
        scales=scales,
        finds_unused=r.random() < 0.5,
        sets_to_none=r.random() < 0.6,
        toggles={}
        if joins or optimizer == "onebit_adam"
        else _some(r, steps, 0.08, lambda: r.randrange(100)),
        raises=_some(r, steps, 0.08, lambda: (r.randrange(world_size), r.choice(("head", "stem"))))
        if can_raise
        else {},
        checkpoints=frozenset() if joins else frozenset(_some(r, steps, 0.06, int)),
        reattaches=frozenset() if joins else frozenset(_some(r, steps, 0.05, int)),
        faults=faults,
    )
    # Who dies while the ranks meet anew has no connections that would break.
    is_waited_for = bool(plan.reattaches) and "kill" in {fault.kind for fault in faults}
    return replace(plan, timeout_s=DEADLINE_S) if is_waited_for else plan


def _some(r: random.Random, steps: int, share: float, value: Any) -> dict[int, Any]:
    return {step: value() for step in range(1, steps) if r.random() < share}


def _algorithms(r: random.Random, steps: int, joins: bool) -> tuple[tuple[int, str], ...]:
    if joins:
        return ((0, r.choice(EXACT)),)
    pick = [*BY_GRADIENT[:-1], *BY_WEIGHT, "mean", "mean"]
    found = [(0, r.choice(pick))]
    if steps > 4 and r.random() < 0.25:
        found.append((r.randint(1, steps - 1), r.choice(pick)))
    names = {name for _, name in found}
    if "bytegrad" in names and names & set(BY_WEIGHT):  # a rank can't know how coarsely the others have moved
        return ((0, found[0][1]),)
    return tuple(found)


def _blocks(r: random.Random, *, may_mix: bool, may_be_sparse: bool) -> tuple[tuple[str, str], ...]:
    kinds = [r.choice(BLOCKS) for _ in range(r.randint(1, 6))]
    if may_be_sparse and r.random() < 0.2:
        kinds.append("sparse")
    dtypes = ("", "", "", "", "float32", "float64", "bfloat16") if may_mix else ("",)
    return tuple((kind, r.choice(dtypes)) for kind in kinds)


def _options(r: random.Random, scales: bool) -> dict[str, Any]:
    return {
        "bucket_cap_mb": r.choice((1e-4, 1e-3, 0.01, 10.0)),
        "first_bucket_mb": r.choice((1e-4, 1e-3, 1.0)),
        "chunk_mb": r.choice((None, None, 1e-3, 1e-2)),
        "gradient_as_bucket_view": r.random() < 0.7,
        "broadcast_buffers": r.random() < 0.7,
        "check": not scales and r.random() < 0.2,
        "commit": r.choice(("host", "stream")),
    }


def _faults(r: random.Random, world_size: int) -> tuple[Fault, ...]:
    found = []
    while world_size > 1 and r.random() < 0.45:
        kind = r.choices(("kill", "kill early", "stop", "pause"), (12, 1, 1, 5))[0]
        found.append(Fault(kind, r.randrange(world_size), r.uniform(0.0, 0.5), r.uniform(0.05, 0.5)))
        if kind == "pause":
            break
        world_size -= 1
    return tuple(found)
