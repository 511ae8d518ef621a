"""What a generation's ledger means: the same error on every rank, with names.

The reduced ledger is equal on all ranks, so all take the same branch here; only then does each say on the
control lane what it knows, so that the text can name ranks and parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from bagua_rt.attach.agreement import Line, agree_on, difference, gather
from bagua_rt.control import UNSEEN, Control, LedgerResult
from bagua_rt.errors import LayoutMismatchError, PeerError, UnusedParameterError, UsageError

_SHOWN = 5


def raise_if_out_of_step(result: LedgerResult, control: Control, place: Callable[[], Sequence[Line]]) -> None:
    """Raise if the ranks are not at one point of one generation, with one plan, in one stage.

    Args:
        result: The reduced ledger.
        control: The control lane.
        place: Says where this rank is: the first difference is named.

    Raises:
        LayoutMismatchError: they are not.
    """
    parts = {
        "generation": result.generation_differs,
        "stage of the algorithm": result.stage_differs,
        "bucket plan": result.plan_differs,
        "place": result.place_differs,
    }
    if differing := [what for what, differs in parts.items() if differs]:
        agree_on(place(), control)
        raise LayoutMismatchError(
            f"the ranks are out of step: they differ in {' and '.join(differing)}",
            expected="every rank to run the same synchronised backwards and the same switches",
            fix="look for a rank that ran an extra or one backward less, or loaded another checkpoint",
        )


def raise_if_steps_differ(
    result: LedgerResult, control: Control, steps: Callable[[], Sequence[Line]]
) -> None:
    """Raise if a rank's optimizers have stepped more or less often than the others', or otherwise.

    Args:
        result: The reduced ledger.
        control: The control lane.
        steps: Says how far this rank's optimizers are; nothing on a rank without data.

    Raises:
        LayoutMismatchError: they have: the replicas have gone apart.
    """
    if not result.steps_differ:
        return
    of_rank = gather(steps(), control, "the steps")
    raise difference(
        {rank: lines for rank, lines in enumerate(of_rank) if lines},
        "the ranks' optimizers have gone apart, and the weights with them",
        fix="let every rank step, skip and schedule alike; close() and attach() again start from rank 0's",
    )


def raise_if_given_up(result: LedgerResult, control: Control, generation: int, *, is_mine: bool) -> None:
    """Raise on the ranks whose backward was fine, if others' backwards raised.

    Raises:
        PeerError: another rank's backward raised.
    """
    if not result.any_aborted or result.all_aborted:
        return
    flags = control.agree(f"given up/{generation}", b"1" if is_mine else b"0")
    ranks = [rank for rank, flag in enumerate(flags) if flag == b"1"]
    if not is_mine:
        raise PeerError(
            f"generation {generation} was given up",
            got=f"an exception in the backward of {_ranks(ranks) if ranks else 'another thread'}",
            fix="repeat the step on all ranks, or end them all",
        )


def raise_if_not_finite(result: LedgerResult, control: Control, mine: Sequence[str]) -> None:
    """Raise on every rank if some rank's local gradient is not finite.

    Raises:
        UsageError: names the ranks and parameters.
    """
    if not result.any_nonfinite:
        return
    texts = _gather(control, "not finite", mine)
    raise UsageError(
        "a gradient is not finite",
        expected="finite gradients (check=True)",
        got="; ".join(texts),
        fix="lower the learning rate or the loss scale; the weights are as before the step",
    )


def raise_if_unused(
    result: LedgerResult, control: Control, names: Sequence[str], missing: Sequence[int]
) -> None:
    """Raise on every rank if some parameter had no gradient on some rank.

    Raises:
        UnusedParameterError: names the parameters, and on which ranks.
    """
    if not result.missing_somewhere:
        return
    texts = _gather(
        control, "unused", [name for name, mine in zip(names, missing, strict=True) if mine == UNSEEN]
    )
    listed = [names[i] for i in result.missing_somewhere]
    raise UnusedParameterError(
        f"parameters got no gradient: {_shown(listed)}",
        expected="a gradient for every parameter on every rank",
        got="; ".join(texts),
        fix="pass find_unused_parameters=True, or name what is never used in ignore",
    )


def _gather(control: Control, topic: str, mine: Sequence[str]) -> list[str]:
    """One text for each rank that has something to say: "rank 1: a, b"."""
    payload = json.dumps([_shown(mine) if mine else ""]).encode()
    texts = [json.loads(answer)[0] for answer in control.agree(topic, payload)]
    return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]


def _shown(names: Sequence[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
