"""Argument checks of collectives: a fast yes, and a slow explanation of a no.

Every collective first asks one cheap question about all its arguments together. Only when the answer is no
does a function here look for what is wrong, so a right call pays for none of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import attrgetter
from typing import Any, NoReturn

import torch

from bagua_rt.errors import InternalError, UsageError

_DTYPE = attrgetter("dtype")  # map() calls it without a frame in between
_TENSOR, _STRIDED = torch.Tensor, torch.strided  # for the fast yes: each look-up in torch costs 25 ns
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
# What every backend reduces.
REDUCIBLE: Mapping[str, frozenset[torch.dtype]] = {
    "sum": _FLOATS | _INTEGERS | _COMPLEX,
    "avg": _FLOATS | _COMPLEX,
    "max": _FLOATS | _INTEGERS | {torch.bool},
    "min": _FLOATS | _INTEGERS | {torch.bool},
    "prod": _FLOATS | _INTEGERS | {torch.bool},
}


def is_plain(t: Any, device: torch.device) -> bool:
    """Can `t`'s memory be sent as it lies?

    A dense contiguous tensor on `device`, with no pending conjugation or negation.
    """
    return (
        isinstance(t, _TENSOR)
        and t.layout is _STRIDED
        and t.device == device
        and t.is_contiguous()
        and not t.is_neg()
        and not t.is_conj()
    )


def refuse_tensor(operation: str, argument: str, t: Any, device: torch.device) -> NoReturn:
    """Say why `is_plain` is false.

    Raises:
        UsageError: always.
    """
    what = f"{operation}: {argument} can't be sent or received"
    if not isinstance(t, torch.Tensor):
        raise UsageError(what, expected="a torch.Tensor", got=type(t).__name__)
    if t.layout is not torch.strided:
        raise UsageError(
            what, expected="a dense tensor", got=f"layout {t.layout}", fix="send its dense parts"
        )
    if t.device != device:
        raise UsageError(
            what, expected=f"a tensor on {device}", got=f"one on {t.device}", fix="move it there"
        )
    if not t.is_contiguous():
        raise UsageError(
            what,
            expected="a contiguous tensor",
            got=f"shape {tuple(t.shape)} with strides {t.stride()}",
            fix="pass .contiguous(), and copy the result back if it is an output",
        )
    if t.is_neg() or t.is_conj():
        raise UsageError(
            what,
            expected="a tensor without a pending conjugation or negation",
            got="a lazy view",
            fix="pass .resolve_conj() or .resolve_neg()",
        )
    raise InternalError(f"{what}, but nothing is wrong with it")


def require_plain(operation: str, device: torch.device, **tensors: Any) -> None:
    """Refuse the first of `tensors` that is not plain, by its argument's name.

    Raises:
        UsageError: one of them is not.
    """
    for argument, t in tensors.items():
        if not is_plain(t, device):
            refuse_tensor(operation, argument, t, device)


def require_list(
    operation: str, argument: str, tensors: Any, count: int, device: torch.device
) -> Sequence[torch.Tensor]:
    """Refuse a list that does not hold one plain tensor per rank.

    Raises:
        UsageError: it doesn't.
    """
    if not isinstance(tensors, list | tuple) or len(tensors) != count:
        got = f"{len(tensors)} of them" if isinstance(tensors, list | tuple) else type(tensors).__name__
        raise UsageError(
            f"{operation}: {argument} does not fit the communicator",
            expected=f"a list of {count} tensors, one per rank",
            got=got,
        )
    for index, t in enumerate(tensors):
        if not is_plain(t, device):
            refuse_tensor(operation, f"{argument}[{index}]", t, device)
    return tensors


def refuse_moved(operation: str) -> NoReturn:
    """Say that a tensor no longer lies where it did when the call was prepared.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{operation}: the tensor of this prepared call has moved",
        expected="the memory that it had when the call was prepared",
        got="a tensor that was resized, or set to other memory",
        fix="prepare the call anew",
    )


def require_one_dtype(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of several dtypes.

    Raises:
        UsageError: there are several.
    """
    dtypes = set(map(_DTYPE, tensors))
    if len(dtypes) > 1:
        raise UsageError(
            f"{operation}: the tensors have several dtypes",
            expected="one dtype",
            got=", ".join(sorted(map(str, dtypes))),
            fix="convert them, or launch one operation per dtype",
        )


def require_numel(operation: str, argument: str, t: torch.Tensor, numel: int, why: str) -> None:
    """Refuse a tensor of another number of elements than `numel`.

    Raises:
        UsageError: it has another.
    """
    if t.numel() != numel:
        raise UsageError(
            f"{operation}: {argument} has the wrong size",
            expected=f"{numel} elements ({why})",
            got=f"{t.numel()} elements, shape {tuple(t.shape)}",
        )


def span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of a contiguous tensor's first byte and of the byte past its last."""
    start = t.data_ptr()
    return start, start + t.nbytes


def require_apart(operation: str, writes: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]) -> None:
    """Refuse outputs that share memory with one another or with an input.

    Raises:
        UsageError: two of them do.
    """
    if len(writes) == len(reads) == 1:  # nearly always; the rest is for lists
        (start, end), (other_start, other_end) = span(writes[0]), span(reads[0])
        if end <= other_start or other_end <= start or start == end or other_start == other_end:
            return
    spans = [(*span(t), True) for t in writes] + [(*span(t), False) for t in reads]
    spans = sorted(s for s in spans if s[0] < s[1])
    # Sorted by start, two spans overlap exactly if one starts before the farthest end so far. Inputs may
    # overlap inputs, so the ends of outputs and of everything are kept apart.
    end_of_writes = end_of_all = 0
    for start, end, is_write in spans:
        if start < (end_of_all if is_write else end_of_writes):
            raise UsageError(
                f"{operation}: an output overlaps another tensor of the call in memory",
                expected="outputs apart from the inputs and from one another",
                got="tensors that share bytes",
                fix="use the in-place form, or give the output memory of its own",
            )
        end_of_all = max(end_of_all, end)
        if is_write:
            end_of_writes = max(end_of_writes, end)


def require_place(name: str, lanes: Sequence[object], rank: int, world_size: int) -> None:
    """Refuse a communicator that could not be: without lanes, or of a rank that its world hasn't.

    Raises:
        UsageError: it is one of these.
    """
    if not lanes or len(set(lanes)) != len(lanes):
        raise UsageError("a communicator needs lanes, each of them once", got=f"{len(lanes)} lanes")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"communicator {name!r}: rank {rank} is not usable", expected=f"0 to {world_size - 1}"
        )


def require_rank(
    operation: str, argument: str, rank: Any, world_size: int, own_rank: int | None = None
) -> None:
    """Refuse a rank outside the communicator, or `own_rank`.

    Raises:
        UsageError: it is one of these.
    """
    # A plain int first: to ask for Integral takes ten times as long.
    is_rank = type(rank) is int or (isinstance(rank, Integral) and not isinstance(rank, bool))
    if not is_rank or not 0 <= int(rank) < world_size:
        raise UsageError(
            f"{operation}: {argument} is no rank of this communicator",
            expected=f"0 to {world_size - 1}",
            got=repr(rank),
        )
    if rank == own_rank:
        raise UsageError(
            f"{operation}: {argument} is this rank itself",
            expected="another rank",
            got=repr(rank),
            fix="copy the tensor",
        )


def require_integer(operation: str, argument: str, value: Any) -> None:
    """Refuse what is no whole number of 64 bits.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or not -(2**63) <= int(value) < 2**63:
        raise UsageError(
            f"{operation}: {argument} is not usable",
            expected="a whole number of 64 bits",
            got=repr(value),
        )


def refuse_reduction(
    operation: str,
    t: torch.Tensor,
    op: Any,
    reducible: Mapping[str, frozenset[torch.dtype]],
    backend: str,
) -> NoReturn:
    """Say why `op` can't reduce `t`.

    Raises:
        UsageError: always.
    """
    if not isinstance(op, str) or op not in reducible:
        raise UsageError(
            f"{operation}: unknown reduction",
            expected=" · ".join(REDUCE_OPS).replace(" · ", ", "),
            got=repr(op),
        )
    others = [name for name in REDUCE_OPS if t.dtype in reducible[name]]
    dtypes = ", ".join(sorted(str(d).removeprefix("torch.") for d in reducible[op]))
    raise UsageError(
        f"{operation}: the backend {backend} can't reduce {t.dtype} with {op!r}",
        expected=f"one of {dtypes}",
        got=str(t.dtype),
        fix=f"use {', '.join(others)} or convert it"
        if others
        else "convert it, or gather it and reduce locally",
    )
