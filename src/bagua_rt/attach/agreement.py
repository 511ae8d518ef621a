"""Do all ranks attach the same thing? If not, every rank raises the same text, before anything is moved."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from bagua_rt.attach.names import NamedTensors
from bagua_rt.control import Control
from bagua_rt.errors import LayoutMismatchError, UsageError

T = TypeVar("T")

Line = tuple[str, str]
"""What it is about ("parameter 'a.weight'"), and what this rank has there."""

_END: Line = ("the end of the list", "nothing more")


def describe(named: NamedTensors, settings: Mapping[str, object]) -> list[Line]:
    """Everything that ranks must have in common, in the order in which differences are worth telling."""
    lines: list[Line] = []
    lines += [(f"parameter {name!r}", kind_of(param)) for name, param in named.parameters.items()]
    lines += [(f"buffer {name!r}", kind_of(buffer)) for name, buffer in named.buffers.items()]
    lines.append(("the ignored names", ", ".join(named.ignored) or "none"))
    lines += [(f"the setting {key}", str(value)) for key, value in settings.items()]
    return lines


def agree_on(
    lines: Sequence[Line],
    control: Control,
    what: str = "the ranks differ",
    fix: str = "build the same model, with the same arguments, and run the same steps on every rank",
) -> None:
    """Compare `lines` with all ranks.

    Args:
        lines: What this rank has.
        control: The control lane.
        what: What is wrong if they differ, to be read before ", first in …".
        fix: What the reader can do then.

    Raises:
        LayoutMismatchError: on every rank; names the first difference and the odd ranks.
    """
    payload = json.dumps(lines).encode()
    if len(set(control.agree("layout digest", hashlib.sha256(payload).digest()))) > 1:
        of_rank = gather(lines, control, "layout")
        raise difference(dict(enumerate(of_rank)), what, fix=fix)


def on_all_ranks(
    call: str, control: Control, attempt: Callable[[], T], undo: Callable[[T], object] | None = None
) -> T:
    """Attempt something here, and see that it went well on all; if not on one, no rank goes on.

    Args:
        call: What is attempted, as the trainer wrote it.
        control: The control lane.
        attempt: Does it on this rank.
        undo: Given what `attempt` gave here, where no rank goes on.

    Returns:
        What `attempt` gave.

    Raises:
        Exception: what `attempt` raised, on a rank where it did.
        UsageError: on the other ranks; tells what was met, and where.
    """
    try:
        made = attempt()
    except Exception as error:
        _outcomes(call, f"{type(error).__name__}: {error}", control)
        raise
    try:
        met = {rank: text for rank, text in enumerate(_outcomes(call, "", control)) if text}
        if met:
            raise UsageError(
                f"{call} was refused on rank {', '.join(map(str, met))}",
                expected="a call that every rank can follow",
                got="; ".join(f"rank {rank}: {text}" for rank, text in met.items()),
                fix="mend the call on that rank, then repeat it on all",
            )
    except BaseException:
        if undo is not None:
            undo(made)
        raise
    return made


def _outcomes(call: str, mine: str, control: Control) -> list[str]:
    """What each rank met; an empty text from one where all went well."""
    texts = control.agree(f"the outcome of {call}", mine.encode())
    return [text.decode(errors="replace") for text in texts]


def gather(lines: Sequence[Line], control: Control, topic: str) -> list[list[Line]]:
    """Every rank's lines, by rank."""
    answers = control.agree(topic, json.dumps(lines).encode())
    return [[(subject, value) for subject, value in json.loads(answer)] for answer in answers]


def difference(of_rank: Mapping[int, Sequence[Line]], what: str, *, fix: str) -> LayoutMismatchError:
    """The error that names the first difference between ranks' lines, and the odd ranks.

    Args:
        of_rank: The lines of each rank that has a say; not all are equal.
        what: What is wrong, to be read before ", first in …".
        fix: What the reader can do.
    """
    longest = max(map(len, of_rank.values()))
    position = next(i for i in range(longest) if len({_at(lines, i) for lines in of_rank.values()}) > 1)
    here = {rank: _at(lines, position) for rank, lines in of_rank.items()}
    subjects = [{subject for subject, _ in lines} for lines in of_rank.values()]
    named = [line[0] for line in here.values() if line != _END]
    if partial := [subject for subject in named if any(subject not in known for known in subjects)]:
        absent = "nothing of that name"
        here = {rank: (partial[0], dict(lines).get(partial[0], absent)) for rank, lines in of_rank.items()}
    usual = _most_common(list(here.values()))
    first = next(rank for rank, line in here.items() if line == usual)
    odd = {rank: line for rank, line in here.items() if line != usual}
    return LayoutMismatchError(
        f"{what}, first in {usual[0]}",
        expected=f"{_text(usual, usual)} on every rank, as on rank {first}",
        got="; ".join(f"{_text(line, usual)} on rank {rank}" for rank, line in odd.items()),
        fix=fix,
    )


def kind_of(tensor: torch.Tensor) -> str:
    """What ranks must have in common of a tensor, in words."""
    kind = "trainable" if tensor.requires_grad else "no gradient"
    return f"shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, {tensor.dtype}, {kind}"


def _at(lines: Sequence[Line], position: int) -> Line:
    return tuple(lines[position]) if position < len(lines) else _END  # type: ignore[return-value]


def _most_common(lines: Sequence[Line]) -> Line:
    """What most ranks have; the first's where no majority says otherwise."""
    line, count = Counter(lines).most_common(1)[0]
    return line if count > lines.count(lines[0]) else lines[0]


def _text(line: Line, usual: Line) -> str:
    return line[1] if line[0] == usual[0] else f"{line[0]} ({line[1]})"
