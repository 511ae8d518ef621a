"""Buckets: which parameters travel together, where each lies, and the digest that all ranks compare.

`plan_buckets` is pure: the same specifications give the same plan on every rank. A `Bucket` is a plan with
memory: one flat buffer, and one view into it for each parameter, with the parameter's own strides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_rt.backend import Views
from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan knows of one parameter.

    Attributes:
        name: Its one name (attach/names.py).
        shape: Its shape.
        stride: Strides of its gradient, in elements; dense, so ``numel`` elements hold it.
        dtype: Its dtype.
        device: Its device, as text.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParameterSpec:
        """Describe `tensor`.

        Raises:
            UsageError: several elements of `tensor` share one place in memory (an expanded tensor).
        """
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if _elements_overlap(shape, stride):
            raise UsageError(
                f"the parameter {name!r} is expanded: several of its elements share one place in memory",
                expected="one place for each element",
                got=f"shape {shape} with strides {stride}",
                fix="make it a parameter of its own with .clone() or .contiguous()",
            )
        if not is_dense(shape, stride):
            stride = contiguous_stride(shape)  # as autograd itself lays out such a parameter's gradient
        return cls(name, shape, stride, tensor.dtype, str(tensor.device))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket: `offset` in elements."""

    spec: ParameterSpec
    offset: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of a plan.

    Attributes:
        index: Its place in the launch order, which is the same on every rank.
        lane: Index of the communication lane it is launched on.
        slots: Its parameters, densely one after the other.
        numel: Elements that belong to parameters.
        padded_numel: Elements of the flat buffer; those from `numel` on are padding, and stay 0.
    """

    index: int
    lane: int
    dtype: torch.dtype
    device: str
    slots: tuple[Slot, ...]
    numel: int
    padded_numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.spec.name for slot in self.slots)


def plan_buckets(
    specs: Sequence[ParameterSpec],
    *,
    cap_bytes: int,
    first_cap_bytes: int,
    alignment: int = 1,
    lanes: int = 1,
) -> tuple[BucketPlan, ...]:
    """Assign every parameter to one bucket.

    A bucket holds one dtype and device and at most `cap_bytes` (the first: `first_cap_bytes`, so that
    communication starts early). A parameter above the cap is alone in its bucket, which is then larger
    than the cap; parameters before it are not held up by it.

    Args:
        specs: The parameters in the order in which their gradients become ready.
        cap_bytes: Most bytes in a bucket.
        first_cap_bytes: Most bytes in the first bucket.
        alignment: Every flat buffer is padded to a multiple of this many elements.
        lanes: Number of lanes; buckets take them in turn.

    Returns:
        The buckets in launch order: by the position of their last parameter.
    """
    closed: list[tuple[int, list[ParameterSpec]]] = []
    open_buckets: dict[tuple[torch.dtype, str], list[ParameterSpec]] = {}
    open_bytes: dict[tuple[torch.dtype, str], int] = {}
    last_position: dict[tuple[torch.dtype, str], int] = {}

    def cap() -> int:
        return cap_bytes if closed else min(first_cap_bytes, cap_bytes)

    def close(key: tuple[torch.dtype, str]) -> None:
        open_bytes.pop(key, None)
        if members := open_buckets.pop(key, []):
            closed.append((last_position[key], members))

    for position, spec in enumerate(specs):
        key = (spec.dtype, spec.device)
        if open_bytes.get(key, 0) + spec.nbytes > cap():
            close(key)
        open_buckets.setdefault(key, []).append(spec)
        open_bytes[key] = open_bytes.get(key, 0) + spec.nbytes
        last_position[key] = position
        if spec.nbytes > cap():
            close(key)
    for key in list(open_buckets):
        close(key)
    closed.sort(key=lambda entry: entry[0])
    return tuple(_plan(index, index % lanes, members, alignment) for index, (_, members) in enumerate(closed))


def _plan(index: int, lane: int, members: Sequence[ParameterSpec], alignment: int) -> BucketPlan:
    slots: list[Slot] = []
    offset = 0
    for spec in members:
        slots.append(Slot(spec, offset))
        offset += spec.numel
    padded = -(-offset // alignment) * alignment
    return BucketPlan(index, lane, members[0].dtype, members[0].device, tuple(slots), offset, padded)


class Bucket:
    """A bucket with its memory.

    Attributes:
        plan: What lies where.
        flat: The buffer that is communicated, ``[padded_numel]``; its padding is 0 and must stay 0. It
            can't be replaced: gradients and weights are views of it.
        views: For each parameter, its part of `flat`, with the parameter's shape and strides.
        params: The parameters, in the order of the views.
        index: ``plan.index``.
    """

    def __init__(self, plan: BucketPlan, params: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.index = plan.index
        self.params = tuple(params)
        self._flat = torch.zeros(plan.padded_numel, dtype=plan.dtype, device=plan.device)
        self.views = Views(
            torch.as_strided(self._flat, slot.spec.shape, slot.spec.stride, slot.offset)
            for slot in plan.slots
        )

    @property
    def flat(self) -> torch.Tensor:
        return self._flat

    @flat.setter
    def flat(self, value: object) -> None:
        raise UsageError(
            f"the buffer of bucket {self.index} can't be replaced",
            expected="communicate() to work in place, or to copy its result there",
            got=f"an assignment of {type(value).__name__} to bucket.flat",
            fix="write bucket.flat.copy_(result), on the lane",
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does `tensor` live in this bucket's memory?"""
        if tensor.layout is not torch.strided:  # a sparse gradient, beside buckets of weights
            return False
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr() != 0

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {self.plan.nbytes} bytes of {self.plan.dtype}, {list(self.plan.names)})"


def plan_digest(plans: Sequence[BucketPlan], *, extra: str = "") -> bytes:
    """Eight bytes that differ when two plans differ in anything that ranks must agree on.

    Args:
        plans: The plan.
        extra: What else must agree (the algorithm's settings).
    """
    return hashlib.sha256((repr(plans) + extra).encode()).digest()[:8]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do the elements fill one gapless block of memory, each in a place of its own?"""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda dim: dim[1]):
        if size == 0:
            return True
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _elements_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if 0 in shape:
        return False
    reach = 0
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
