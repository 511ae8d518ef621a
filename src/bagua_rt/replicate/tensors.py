"""Tensors made equal, bit for bit, to the root rank's.

They travel as bytes, never as values: NaN payloads, negative zeros and unusual dtypes arrive as they were
sent. What a rank sends depends on shapes and dtypes alone; strides are each rank's own business, because
every tensor crosses in the order of its indices. Small tensors share a *parcel*, one collective; a large one
is a parcel by itself, sent from its own memory where that is contiguous.

[Note: .data]
    Autograd counts the writes to a tensor, and refuses a backward through one that was written to after it
    was saved. Replication happens between iterations, or between two forwards whose backward is still to
    come, and must not count: all writes go through ``.data``, which has a counter of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_rt.backend import Communicator, Device, Event, Stream, Work
from bagua_rt.errors import UsageError

PARCEL_BYTES = 32 << 20
"""Most bytes in a parcel of several tensors."""

ALONE_BYTES = 1 << 20
"""A tensor of this size or more is a parcel by itself: a collective costs less than two copies of it."""

_ALIGNMENT = 16  # bytes; of the largest dtype, complex128

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Parcel:
    """One collective: `wire` is broadcast; `outside[i]` is copied to ``inside[i]``, a part of it, or back."""

    wire: torch.Tensor
    inside: list[list[torch.Tensor]]
    outside: list[list[torch.Tensor]]


class TensorReplicator:
    """Makes the same tensors equal to the root's again and again, planned once.

    ``pack()`` on the training thread, ``queue()`` on the thread that launches communication, and, once what
    it queued is complete, ``unpack()`` on the training thread.

    The number, shapes and dtypes of the tensors must be equal on all ranks; strides may differ. The tensors
    may be on any device. The root's are only read.

    Args:
        tensors: The tensors, in the same order on every rank.
        comm: The ranks.
        device: Streams and events of the device that `comm` communicates on.
        root: The rank whose tensors all others take.

    Attributes:
        root: The same.

    Raises:
        UsageError: a tensor has no plain bytes to send (sparse, quantized, lazy, on the meta device, or of a
            subclass that wraps others).
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], comm: Communicator, device: Device, root: int = 0
    ) -> None:
        self._device = device
        self.root = root
        self._is_root = comm.rank == root
        self._is_alone = comm.world_size == 1
        self._ready: Event | None = None
        self._works: list[Work] = []
        self._plan(tensors)

    def _plan(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            _check(tensor, index)
        self._tensors = tuple(tensors)
        self._places = [_place(tensor) for tensor in tensors]
        if self._is_alone:
            self._parcels: list[_Parcel] = []
            return
        with torch.inference_mode(False), torch.no_grad():  # so that it can be written to outside of one, too
            self._parcels = [self._parcel(indices) for indices in _parcels(tensors)]

    def _parcel(self, indices: Sequence[int]) -> _Parcel:
        tensors = [_bits(self._tensors[i]) for i in indices]
        first = tensors[0]
        is_own = first.device == self._device.torch_device and not _is_lazy_view(first)
        if len(tensors) == 1 and first.is_contiguous() and is_own:
            return _Parcel(first.view(-1).view(torch.uint8), [], [])
        offsets, size = _offsets(tensors)
        wire = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for outside, offset in zip(tensors, offsets, strict=True):
            part = wire[offset : offset + outside.nbytes].view(outside.dtype).view(outside.shape)
            if not self._is_root:
                outside, part = _without_repetition(outside, part)  # noqa: PLW2901
            key = outside.dtype, outside.device, _is_lazy_view(outside)
            inside_list, outside_list = groups.setdefault(key, ([], []))
            inside_list.append(part)
            outside_list.append(outside)
        return _Parcel(wire, [pair[0] for pair in groups.values()], [pair[1] for pair in groups.values()])

    def pack(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Put the root's tensors into the parcels.

        Args:
            tensors: The tensors from now on, where they may have changed (a module replaces a buffer by
                assigning to it); None: those of before. Memory that was swapped under a tensor is noticed.

        **Stream:** queued on the compute stream.
        """
        wanted = self._tensors if tensors is None else tensors
        is_planned = len(wanted) == len(self._tensors) and all(map(_is, wanted, self._tensors))
        if not is_planned or self._places != [_place(tensor) for tensor in wanted]:
            self._plan(wanted)
        if self._is_root:
            with torch.inference_mode(False), torch.no_grad():
                for parcel in self._parcels:
                    for inside, outside in zip(parcel.inside, parcel.outside, strict=True):
                        _copy(outside, inside)
        self._ready = self._device.record(self._device.compute_stream())

    def queue(self, comm: Communicator, stream: Stream) -> None:
        """Launch the collectives of what was packed last.

        Args:
            comm: The ranks: the communicator that the replicator was made for, or a duplicate of it.
            stream: The lane of `comm`.

        **Stream:** queued on `stream`, behind what `pack` queued; never blocks the host.
        """
        if self._ready is not None and not self._device.query(self._ready):
            self._device.wait(stream, self._ready)
        self._works = [comm.broadcast_(parcel.wire, self.root, stream=stream) for parcel in self._parcels]

    def wait(self) -> None:
        """Block the host until what was queued last is complete.

        Raises:
            CollectiveError: a collective did not complete.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def unpack(self) -> None:
        """Write what arrived into the tensors; on the root, nothing. What was queued must be complete.

        **Stream:** queued on the compute stream.
        """
        if self._is_root:
            return
        with torch.inference_mode(False), torch.no_grad():
            for parcel in self._parcels:
                for inside, outside in zip(parcel.inside, parcel.outside, strict=True):
                    _copy(inside, outside)


def replicate_tensors(
    tensors: Sequence[torch.Tensor], comm: Communicator, device: Device, root: int = 0
) -> None:
    """Make `tensors` equal, bit for bit, to those of rank `root`.

    Shapes and dtypes must be equal on all ranks; strides may differ, and are kept. Tensors keep identity
    and autograd version. At most one parcel (or one large non-contiguous tensor) is held in copy.

    Args:
        tensors: Parameters, buffers or state, in the same order on every rank.
        comm: The ranks.
        device: Streams and events of the device that `comm` communicates on.
        root: The rank whose tensors all others take.

    Raises:
        UsageError: a tensor has no plain bytes to send.
        CollectiveError: a collective did not complete.

    **Stream:** lane 0 and the compute stream; blocks the host until every tensor has arrived.
    """
    for index, tensor in enumerate(tensors):
        _check(tensor, index)  # all of them before the first moves
    if comm.world_size == 1:
        return
    for indices in _parcels(tensors):
        replicator = TensorReplicator([tensors[i] for i in indices], comm, device, root)
        replicator.pack()
        replicator.queue(comm, comm.lanes[0])
        replicator.wait()
        replicator.unpack()


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if _is_lazy_view(targets[0]):  # the fused copy can't write through these
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


def _is(a: object, b: object) -> bool:
    return a is b


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _parcels(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Which tensors travel together: a function of shapes and dtypes alone, so the same on every rank."""
    parcels: list[list[int]] = []
    shared: list[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        if tensor.nbytes >= ALONE_BYTES:
            parcels.append([index])
        elif tensor.nbytes > 0:
            if shared and size + tensor.nbytes > PARCEL_BYTES:
                parcels.append(shared)
                shared, size = [], 0
            shared.append(index)
            size += _aligned(tensor.nbytes)
    return [*parcels, shared] if shared else parcels


def _offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += _aligned(tensor.nbytes)
    return offsets, size


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _check(tensor: torch.Tensor, index: int) -> None:
    kind = kind_without_bytes(tensor)
    if kind:
        raise UsageError(
            f"tensor {index} can't be made equal on all ranks: it is {kind}",
            expected="a dense tensor with memory of its own",
            got=f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}",
            fix="leave it out (ignore=), or keep it as a plain tensor",
        )


def kind_without_bytes(tensor: torch.Tensor) -> str:
    """Why `tensor` has no bytes that could travel, to be read after "it is"; empty if it has."""
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet (lazy)"
    if tensor.is_meta:
        return "on the meta device"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_quantized:
        return "quantized"
    if type(tensor.data) is not torch.Tensor:
        return "of a tensor subclass"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as integers, with its shape and strides ([Note: .data])."""
    data = tensor.data
    if _is_lazy_view(data):
        return data  # its memory isn't its value: copied as values, which changes no bit but the signs
    if data.dtype is torch.complex128:
        return torch.view_as_real(data).view(torch.int64)
    return data.view(_BITS[data.dtype.itemsize])


def _is_lazy_view(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _without_repetition(outside: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, cut to one index along each dimension that `outside` repeats (an expanded buffer)."""
    for dim, (size, step) in enumerate(zip(outside.shape, outside.stride(), strict=True)):
        if size > 1 and step == 0:
            outside, inside = outside.narrow(dim, 0, 1), inside.narrow(dim, 0, 1)
    return outside, inside
