"""The fused bucket operations on CUDA: the kernels of ``kernels/``, launched by cuda.core."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bagua_rt.backend import Stream
from bagua_rt.backends import _codec_cpu
from bagua_rt.backends._nvrtc import ELEMENTS, KernelCache, Variant
from bagua_rt.backends._nvrtc import _cuda as import_cuda
from bagua_rt.backends.cuda_device import CudaDevice
from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream, cuda_error
from bagua_rt.errors import CudaError, UsageError

# Geometry of kernels/README.md.
_THREADS = 256
_TILE = 4096
_SIGN_TILE = 8192
_SIGN_TILES_AT_MOST = 1024
_SIGN_COLUMNS = 2048
_BLOCKS_PER_MULTIPROCESSOR = 8

_SMALLEST_TABLE_BYTES = 4096
_NAMES = {getattr(torch, name): name for name in ELEMENTS}
_Rows = npt.NDArray[np.int64]


class CudaKernels:
    """`bagua_rt.backend.Kernels` on CUDA: each call is a launch or two on the stream that it is given.

    Args:
        device: Where to launch.
        cache: The compiled kernels.

    **Source:** the docstrings of the protocol; kernels/README.md.
    """

    def __init__(self, device: CudaDevice, cache: KernelCache) -> None:
        core = import_cuda("core")
        self._device, self._cache = device, cache
        self._launch_raw, self._config = core.launch, core.LaunchConfig
        multiprocessors: int = device.raw.properties.multiprocessor_count
        self._blocks_at_most = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        self._tables = _Tables(device)
        self._variants: dict[tuple[str, ...], Variant] = {}

    def copy_in(
        self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], scale: float, stream: Stream
    ) -> None:
        """``views[i] = tensors[i] * scale``; a tensor that already is its view is scaled in place."""
        self._copy("copy_in", tensors, views, scale, self._device.stream(stream))

    def copy_out(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """``tensors[i] = views[i]``."""
        self._copy("copy_out", views, tensors, 1.0, self._device.stream(stream))

    def sign_encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error`` to its signs and its mean magnitude.

        Raises:
            UsageError: `error` is not float32 (float64 for float64 values).
        """
        if error.dtype is not torch.promote_types(values.dtype, torch.float32):
            raise UsageError(
                "sign_encode: the error feedback has a dtype that no kernel is for",
                expected=f"{torch.promote_types(values.dtype, torch.float32)} for {values.dtype} values",
                got=str(error.dtype),
            )
        own, (rows, columns) = self._device.stream(stream), values.shape
        variant = self._variant("sign_encode", values.dtype)
        tiles = min(_SIGN_TILES_AT_MOST, max(1, -(-columns // _SIGN_TILE)))
        partial = self._scratch(own, rows * tiles * 8)
        pointers = values.data_ptr(), error.data_ptr()
        shape = columns, numel, first, tiles
        blocks = rows * tiles  # exactly: the order of the sum depends on it
        self._launch(own, variant, blocks, (*pointers, partial.data_ptr(), *shape), "sign_encode_sums")
        self._launch(own, variant, blocks, (*pointers, wire.data_ptr(), partial.data_ptr(), *shape))
        self._device.record_holding(own, (values, error, wire, partial))

    def sign_decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out[k] = scale[k] * sign[k]`` for each row k."""
        own, (rows, columns) = self._device.stream(stream), out.shape
        blocks = self._blocks(-(-rows * columns // _SIGN_COLUMNS))
        variant = self._variant("sign_decode", out.dtype)
        self._launch(own, variant, blocks, (wire.data_ptr(), out.data_ptr(), rows, columns))
        self._device.record_holding(own, (wire, out))

    def sign_decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out = mean over k of scale[k] * sign[k]``, in row order."""
        own, rows, columns = self._device.stream(stream), wire.shape[0], out.numel()
        blocks = self._blocks(-(-columns // _SIGN_COLUMNS))
        variant = self._variant("sign_decode_mean", out.dtype)
        self._launch(own, variant, blocks, (wire.data_ptr(), out.data_ptr(), rows, columns))
        self._device.record_holding(own, (wire, out))

    def minmax_row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """How many bytes a row of `columns` elements has in the codec MinMaxUInt8."""
        return _codec_cpu.minmax_row_bytes(columns, dtype)

    def minmax_encode(
        self, values: torch.Tensor, numel: int, first: int, wire: torch.Tensor, stream: Stream
    ) -> None:
        """Compress each row of `values` to one byte an element, with a range for every 2,048 elements."""
        own, (rows, columns) = self._device.stream(stream), values.shape
        blocks = self._blocks(rows * max(1, -(-columns // _codec_cpu.CHUNK)))
        variant = self._variant("minmax_encode", values.dtype)
        pointers = values.data_ptr(), wire.data_ptr()
        self._launch(own, variant, blocks, (*pointers, rows, columns, numel, first))
        self._device.record_holding(own, (values, wire))

    def minmax_decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The values of rows that `minmax_encode` made; padding becomes 0."""
        own, (rows, columns) = self._device.stream(stream), out.shape
        blocks = self._blocks(rows * -(-columns // _codec_cpu.CHUNK))
        variant = self._variant("minmax_decode", out.dtype)
        self._launch(own, variant, blocks, (wire.data_ptr(), out.data_ptr(), rows, columns))
        self._device.record_holding(own, (wire, out))

    def minmax_decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out = mean over k of row k``, in row order."""
        own, rows, columns = self._device.stream(stream), wire.shape[0], out.numel()
        blocks = self._blocks(-(-columns // _codec_cpu.CHUNK))
        variant = self._variant("minmax_decode_mean", out.dtype)
        self._launch(own, variant, blocks, (wire.data_ptr(), out.data_ptr(), rows, columns))
        self._device.record_holding(own, (wire, out))

    def _scratch(self, stream: CudaStream, size_bytes: int) -> torch.Tensor:
        """Memory that belongs to `stream`, the same each time: its kernels run one after the other.

        When more is needed, the old memory lives on in the events of the kernels that use it.
        """
        if stream.scratch is None or stream.scratch.numel() < size_bytes:
            stream.scratch = self._device.torch_side.empty_on(stream.handle, size_bytes)
        return stream.scratch

    # ---- copies

    def _copy(
        self,
        operation: str,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        scale: float,
        stream: CudaStream,
    ) -> None:
        """One launch for each pair of dtypes; what doesn't lie alike, or isn't floating point, by torch."""
        alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, int]]] = {}
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, target in zip(sources, targets, strict=True):
            pointers, numel = (source.data_ptr(), target.data_ptr()), target.numel()
            if not numel or (pointers[0] == pointers[1] and scale == 1.0 and _lie_alike(source, target)):
                continue
            pair = source.dtype, target.dtype
            if pair[0] in _NAMES and pair[1] in _NAMES and _lie_alike(source, target):
                alike.setdefault(pair, []).append((*pointers, numel))
            else:
                others.append((source, target))
        for pair, spans in alike.items():
            self._launch_copy(self._variant(operation, *pair), spans, scale, stream)
        if alike:
            self._device.record_holding(stream, (tuple(sources), tuple(targets)))
        if others:
            self._device.run(stream, lambda: _copy_by_torch(others, scale))

    def _launch_copy(
        self, variant: Variant, spans: list[tuple[int, int, int]], scale: float, stream: CudaStream
    ) -> None:
        rows = np.empty((len(spans), 4), np.int64)
        rows[:, :3] = spans
        tiles_of = (rows[:, 2] + (_TILE - 1)) // _TILE
        rows[:, 3] = np.cumsum(tiles_of) - tiles_of
        tiles = int(tiles_of.sum())
        table = self._tables.put(rows, stream)
        arguments: tuple[int | float, ...] = (table.address, len(spans), tiles)
        if variant.operation == "copy_in":
            arguments = (*arguments, float(scale))
        self._launch(stream, variant, self._blocks(tiles), arguments)
        table.used_until = self._device.record(stream)

    # ---- launches

    def _variant(self, operation: str, *dtypes: torch.dtype) -> Variant:
        key = (operation, *(_NAMES.get(dtype, str(dtype)) for dtype in dtypes))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = Variant.of(*key)
        return variant

    def _blocks(self, wanted: int) -> int:
        return max(1, min(wanted, self._blocks_at_most))

    def _launch(
        self,
        stream: CudaStream,
        variant: Variant,
        blocks: int,
        arguments: tuple[int | float, ...],
        operation: str = "",
    ) -> None:
        """Launch a kernel; the caller keeps the memory behind its arguments alive."""
        if not blocks:
            return
        self._device.require_open(stream)
        self._device.enter()
        kernel = self._cache.kernel(variant, operation)
        config = self._config(grid=blocks, block=_THREADS)
        try:
            self._launch_raw(stream.raw, config, kernel, *arguments)
        except Exception as error:
            raise cuda_error(f"the launch of {operation or variant.entry()}", error) from error


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
        if scale != 1.0:
            target.mul_(scale)


class _Table:
    """A table of tensors: pinned memory that the host writes, and device memory that a kernel reads."""

    def __init__(self, host: Any, device: Any, size_bytes: int) -> None:
        self._host, self._device, self.size_bytes = host, device, size_bytes
        self.host_address, self.address = int(host.handle), int(device.handle)
        self.used_until: CudaEvent | None = None

    def is_free(self) -> bool:
        """Has the device read it for the last time?"""
        return self.used_until is not None and self.used_until.has_landed()


class _Tables:
    """Tables that are used again once the launch that read them is complete."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._core, self._driver = import_cuda("core"), import_cuda("bindings.driver")
        self._lock = threading.Lock()
        self._all: list[_Table] = []

    def put(self, rows: _Rows, stream: CudaStream) -> _Table:
        """Queue the copy of `rows` to the device; set the table's ``used_until`` behind its last use.

        **Stream:** the copy is queued on `stream`, from pinned memory, so the host doesn't wait for it.
        """
        size_bytes = rows.nbytes
        with self._lock:
            table = next((t for t in self._all if t.size_bytes >= size_bytes and t.is_free()), None)
            if table is None:
                table = self._new(size_bytes, stream)
            table.used_until = None
        ctypes.memmove(table.host_address, rows.ctypes.data, size_bytes)
        (status,) = self._driver.cuMemcpyHtoDAsync(
            table.address, table.host_address, size_bytes, stream.handle
        )
        if int(status):
            raise CudaError(f"cuMemcpyHtoDAsync failed: {status}")
        return table

    def _new(self, size_bytes: int, stream: CudaStream) -> _Table:
        capacity = _SMALLEST_TABLE_BYTES
        while capacity < size_bytes:
            capacity *= 2
        self._device.enter()
        try:
            host = self._core.LegacyPinnedMemoryResource().allocate(capacity)
            device = self._device.raw.allocate(capacity, stream=stream.raw)
        except Exception as error:
            raise cuda_error("the allocation of a table", error) from error
        table = _Table(host, device, capacity)
        self._all.append(table)
        return table
