"""Optimizers made equal to the root rank's: state tensors, scalars and hyper-parameters.

Neither ``step()`` nor ``load_state_dict()`` is called: the one moves the weights, the other casts the state
to the parameter's dtype. All ranks first agree that they mean the same parameters, then that each of them can
take up the root's structure; only then are tensors moved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from bagua_rt.backend import Communicator, Device
from bagua_rt.errors import LayoutMismatchError, UsageError
from bagua_rt.replicate.structure import Receiver, Sender
from bagua_rt.replicate.tensors import replicate_tensors

if TYPE_CHECKING:
    from bagua_rt.control import Control


def replicate_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    device: Device,
    control: Control,
    root: int = 0,
    *,
    names: Mapping[torch.Tensor, str] | None = None,
) -> None:
    """Make the optimizers' state and hyper-parameters equal to those of rank `root`.

    Parameters are known by group and position. State tensors of the same description are overwritten where
    they are; missing ones are made, on the CPU where the root's are and else where their parameter is, and
    what the root doesn't have is removed. The groups' ``params`` and ``param_names`` stay, and ``defaults``.

    Args:
        optimizers: The optimizers, in the same order on every rank.
        comm: The ranks.
        device: Streams and events of the device that `comm` communicates on.
        control: The control lane of the same ranks.
        root: The rank whose state all others take.
        names: Parameters' names, to tell apart those of one shape and to write errors with.

    Raises:
        LayoutMismatchError: the ranks' optimizers, groups or parameters differ; on every rank, before
            anything is moved.
        UsageError: the root's state holds something that can't be sent, or another rank can't take it up; on
            every rank, before anything is moved.
        CollectiveError: a collective did not complete.

    **Stream:** lane 0 and the compute stream; blocks the host until everything has arrived.
    """
    if comm.world_size == 1:
        return
    sender = Sender(optimizers)
    skeleton, problem = sender.skeleton() if comm.rank == root else (b"", "")
    said = json.dumps({"facts": _facts(optimizers, names or {}), "problem": problem}).encode()
    answers = [json.loads(text) for text in control.agree("the optimizers", said)]
    _raise_difference([answer["facts"] for answer in answers])
    _raise_problems("has optimizer state that can't be sent", [answer["problem"] for answer in answers])

    receiver = Receiver(optimizers, device.torch_device)
    skeleton = control.broadcast(skeleton, root)
    problem = receiver.take_up(skeleton) if comm.rank != root else ""
    problems = control.agree("the optimizers' state", problem.encode())
    _raise_problems("can't take up the optimizer state", [text.decode() for text in problems])
    replicate_tensors(sender.tensors if comm.rank == root else receiver.tensors, comm, device, root)
    receiver.commit()


def _facts(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]
) -> list[tuple[str, str]]:
    """What must be equal on all ranks: (subject, what it is); a count comes before what it counts."""
    facts = [("the number of optimizers", str(len(optimizers)))]
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        facts.append((f"the class of optimizer {number}", f"{kind.__module__}.{kind.__qualname__}"))
        where = f"optimizer {number} ({kind.__name__})"
        facts.append((f"the number of parameter groups of {where}", str(len(optimizer.param_groups))))
        for index, group in enumerate(optimizer.param_groups):
            facts.append((f"the number of parameters in group {index} of {where}", str(len(group["params"]))))
            for position, param in enumerate(group["params"]):
                text = f"{names.get(param, '')} {param.dtype} {list(param.shape)}".strip()
                facts.append((f"parameter {position} in group {index} of {where}", text))
    return facts


def _raise_difference(facts: Sequence[Sequence[Sequence[str]]]) -> None:
    for answers in zip(*facts, strict=False):  # the counts at its beginning tell a longer one first
        ranks_by_text: dict[str, list[int]] = {}
        for rank, (_, text) in enumerate(answers):
            ranks_by_text.setdefault(text, []).append(rank)
        if len(ranks_by_text) == 1:
            continue
        usual, *odd = sorted(ranks_by_text, key=lambda text: -len(ranks_by_text[text]))
        raise LayoutMismatchError(
            f"{answers[0][0]} differs on {_ranks([r for text in odd for r in ranks_by_text[text]])}",
            expected=f"{usual} as on {_ranks(ranks_by_text[usual])}",
            got=", ".join(f"{text} on {_ranks(ranks_by_text[text])}" for text in odd),
            fix="make the same optimizers, of the same parameters in the same order, on every rank",
        )


def _raise_problems(what: str, problems: Sequence[str]) -> None:
    ranks = [rank for rank, problem in enumerate(problems) if problem]
    if ranks:
        raise UsageError(
            f"{_ranks(ranks)} {what}",
            got="; ".join(dict.fromkeys(problem for problem in problems if problem)),
            fix="keep to tensors and plain values that pickle knows in the optimizer's state and groups",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, sorted(ranks)))
