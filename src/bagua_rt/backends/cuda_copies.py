"""Copies between tensors and the views of a bucket on CUDA: one launch for a pair of dtypes.

A kernel reads from a table in device memory where its tensors lie, a row for each of them: address of the
source, address of the target, number of elements, and how many tiles come before it.

[Note: tables are kept]
    A trainer copies the same memory in each step, and to look at a tensor costs the host ten times what its
    row costs the device. So the tables of a bucket's `Views` stay with them, one for each set of addresses on
    a stream, and are found by those of the other tensors. The addresses don't say everything, so these
    tensors' dtypes and strides are compared as well; their shapes are those of the views, by contract, and
    of the views nothing ever changes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from bagua_rt.backend import Views
from bagua_rt.backends._nvrtc import ELEMENTS, KernelCache, Variant
from bagua_rt.backends._nvrtc import _cuda as import_cuda
from bagua_rt.backends.cuda_device import CudaDevice
from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream, cuda_error
from bagua_rt.errors import CudaError

THREADS = 256
_TILE = 4096  # kernels/README.md
_SMALLEST_TABLE_BYTES = 4096
_KEPT_TABLES = 8  # of one bucket: a trainer's gradients may take turns between a few places
_NAMES = {getattr(torch, name): name for name in ELEMENTS}
# map() calls these without a frame in between.
_ADDRESS, _STRIDE, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("dtype")


class Copies:
    """The kernels copy_in and copy_out.

    Args:
        device: Where to launch.
        cache: The compiled kernels.
        blocks: How many blocks to launch, of so many wanted.
    """

    def __init__(self, device: CudaDevice, cache: KernelCache, blocks: Callable[[int], int]) -> None:
        core = import_cuda("core")
        self._device, self._cache, self._blocks = device, cache, blocks
        self._launch, self._config = core.launch, core.LaunchConfig
        self._tables = _Tables(device)
        self._variants: dict[tuple[object, ...], Variant] = {}
        self._configs: dict[int, Any] = {}

    def copy(
        self,
        operation: str,
        tensors: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        scale: float,
        stream: CudaStream,
    ) -> CudaEvent | None:
        """Copy between `tensors` and `views`: into these for "copy_in", times `scale`.

        Returns:
            The event behind it, if there is one: what is launched needs it to keep its tensors alive.
        """
        event: CudaEvent | None = None
        self._device.require_open(stream)
        self._device.enter()
        if isinstance(views, Views):
            prepared = self._find(operation, tensors, views, scale, stream)
        else:
            prepared = self._prepare(operation, tensors, views, scale, stream)
        if prepared.launches:
            scales = (float(scale),) if operation == "copy_in" else ()
            try:
                for launch in prepared.launches:
                    launch(*scales)
            except Exception as error:
                raise cuda_error(f"the launch of {operation}", error) from error
            kept = views if isinstance(views, Views) else tuple(views)
            event = self._device.record_holding(stream, (tuple(tensors), kept, prepared))
            prepared.is_recorded = True
        if others := prepared.others:
            self._device.run(stream, lambda: _copy_by_torch(others, scale))
            event = None
        return event

    def _find(
        self,
        operation: str,
        tensors: Sequence[torch.Tensor],
        views: Views,
        scale: float,
        stream: CudaStream,
    ) -> _Prepared:
        """What was prepared for these addresses before, or now ([Note: tables are kept])."""
        # Views stay where they are; what is in place already is only scaled.
        key = operation, stream, scale == 1.0, *map(_ADDRESS, tensors)
        notes, kinds = views.notes, (*map(_DTYPE, tensors), *map(_STRIDE, tensors))
        known: _Prepared | None = notes.pop(key, None)
        if known is None or known.kinds != kinds:
            known = self._prepare(operation, tensors, views, scale, stream)
            known.kinds = kinds
            if len(notes) >= _KEPT_TABLES:
                del notes[next(iter(notes))]  # what was not used for longest
        if not known.others:
            notes[key] = known
        return known

    def _prepare(
        self,
        operation: str,
        tensors: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        scale: float,
        stream: CudaStream,
    ) -> _Prepared:
        """Look at every pair; what doesn't lie alike, or isn't floating point, is for torch."""
        rows_of: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, int, int]]] = {}
        prepared = _Prepared(self._tables)
        pairs = (tensors, views) if operation == "copy_in" else (views, tensors)
        for source, target in zip(*pairs, strict=True):
            read, written, numel = source.data_ptr(), target.data_ptr(), target.numel()
            is_alike = _lie_alike(source, target)
            if not numel or (read == written and scale == 1.0 and is_alike):
                continue
            pair = source.dtype, target.dtype
            if is_alike and pair[0] in _NAMES and pair[1] in _NAMES:
                rows = rows_of.setdefault(pair, [])
                rows.append((read, written, numel, _tiles(rows[-1]) if rows else 0))
            else:
                prepared.others.append((source, target))
        for pair, rows in rows_of.items():
            table, tiles = self._tables.put(array("q", chain.from_iterable(rows)), stream), _tiles(rows[-1])
            prepared.tables.append(table)
            blocks = self._blocks(tiles)
            config = self._configs.get(blocks)
            if config is None:
                config = self._configs[blocks] = self._config(grid=blocks, block=THREADS)
            kernel = self._cache.kernel(self._variant(operation, pair))
            numbers = table.address, len(rows), tiles
            prepared.launches.append(partial(self._launch, stream.raw, config, kernel, *numbers))
        return prepared

    def _variant(self, operation: str, pair: tuple[torch.dtype, torch.dtype]) -> Variant:
        variant = self._variants.get((operation, *pair))
        if variant is None:
            source, target = pair
            variant = Variant.of(operation, _NAMES[source], _NAMES[target])
            self._variants[operation, source, target] = variant
        return variant


class _Prepared:
    """A copy of certain memory, to be launched again and again.

    Attributes:
        launches: One for each pair of dtypes; they take the scale.
        others: Pairs that no kernel is for: source and target.
        tables: What the launches read.
        kinds: The dtypes and strides of the tensors, which must be these for it to be used again.
        is_recorded: Is an event recorded behind its launches? Then it lives until they have run.
    """

    def __init__(self, pool: _Tables) -> None:
        self.launches: list[Callable[..., None]] = []
        self.others: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tables: list[_Table] = []
        self.is_recorded = False
        self.kinds: tuple[object, ...] = ()
        self._pool = pool

    def __del__(self) -> None:
        if self.is_recorded:
            self._pool.take_back(self.tables)
        else:
            _abandoned.extend(self.tables)


def _tiles(row: tuple[int, int, int, int]) -> int:
    """The number of tiles up to the end of a row."""
    _, _, numel, before = row
    return before + (numel + _TILE - 1) // _TILE


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do the elements of two tensors of one shape cover flat memory, in the same order?"""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() and _is_dense(a)


def _is_dense(t: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _copy_by_torch(pairs: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
    for source, target in pairs:
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        elif not _lie_alike(source, target):
            target.copy_(source.clone())  # the same memory in another order
        if scale != 1.0:
            target.mul_(scale)


_spare_pinned: dict[tuple[int, int], list[Any]] = {}  # by device and size
_abandoned: list[_Table] = []  # the device may still read them: nobody knows for how long


class _Pinned:
    """Pinned memory, which goes back to a list of the process when nobody needs it any more.

    To free it would wait for all that the device has to do, be it a collective that hangs: wherever the
    garbage collector happens to run, and without a deadline.
    """

    def __init__(self, core: Any, device: CudaDevice, size_bytes: int) -> None:
        spare = self._spare = _spare_pinned.setdefault((device.raw.device_id, size_bytes), [])
        try:
            self._buffer = spare.pop()
        except IndexError:
            self._buffer = core.LegacyPinnedMemoryResource().allocate(size_bytes)
        self.address = int(self._buffer.handle)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._spare.append(self._buffer)


class _Table(NamedTuple):
    """Pinned memory that the host writes, and device memory that a kernel reads."""

    host: _Pinned
    device: Any
    words: memoryview
    host_address: int
    address: int
    size_bytes: int


class _Tables:
    """Tables that are used again once the launches that read them are complete."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._core, self._driver = import_cuda("core"), import_cuda("bindings.driver")
        self._spare: dict[int, list[_Table]] = {}  # by size

    def put(self, rows: array[int], stream: CudaStream) -> _Table:
        """Queue the copy of `rows` to the device, in a table of their own.

        **Stream:** the copy is queued on `stream`, from pinned memory, so the host doesn't wait for it.
        """
        used_bytes, size_bytes = len(rows) * rows.itemsize, _SMALLEST_TABLE_BYTES
        while size_bytes < used_bytes:
            size_bytes *= 2
        try:
            table = self._spare.setdefault(size_bytes, []).pop()
        except IndexError:
            table = self._new(size_bytes, stream)
        table.words[: len(rows)] = memoryview(rows)  # no ctypes.memmove, which would let another thread in
        (status,) = self._driver.cuMemcpyHtoDAsync(
            table.address, table.host_address, used_bytes, stream.handle
        )
        if int(status):
            raise CudaError(f"cuMemcpyHtoDAsync failed: {status}")
        return table

    def take_back(self, tables: Sequence[_Table]) -> None:
        """Nothing on the device reads `tables` any more."""
        for table in tables:
            self._spare[table.size_bytes].append(table)

    def _new(self, size_bytes: int, stream: CudaStream) -> _Table:
        try:
            host = _Pinned(self._core, self._device, size_bytes)
            device = self._device.raw.allocate(size_bytes, stream=stream.raw)
        except Exception as error:
            raise cuda_error("the allocation of a table", error) from error
        words = memoryview((ctypes.c_char * size_bytes).from_address(host.address)).cast("B").cast("q")
        return _Table(host, device, words, host.address, int(device.handle), size_bytes)
