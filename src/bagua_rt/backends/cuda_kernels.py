"""The fused bucket operations on CUDA: the kernels of ``kernels/``, launched by cuda.core."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_rt.backend import Stream
from bagua_rt.backends import _codec_cpu
from bagua_rt.backends._nvrtc import ELEMENTS, KernelCache, Variant
from bagua_rt.backends._nvrtc import _cuda as import_cuda
from bagua_rt.backends.cuda_copies import THREADS, Copies
from bagua_rt.backends.cuda_device import CudaDevice
from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream, cuda_error
from bagua_rt.errors import UsageError

# Geometry of kernels/README.md.
_SIGN_TILE = 8192
_SIGN_TILES_AT_MOST = 1024
_SIGN_COLUMNS = 2048
_BLOCKS_PER_MULTIPROCESSOR = 8

_NAMES = {getattr(torch, name): name for name in ELEMENTS}


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
        self._copies = Copies(device, cache, self._blocks)
        self._variants: dict[tuple[str, ...], Variant] = {}

    def copy_in(
        self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], scale: float, stream: Stream
    ) -> CudaEvent:
        """``views[i] = tensors[i] * scale``; a tensor that already is its view is scaled in place."""
        own = self._device.stream(stream)
        return self._copies.copy("copy_in", tensors, views, scale, own) or self._device.record(own)

    def copy_out(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """``tensors[i] = views[i]``."""
        self._copies.copy("copy_out", tensors, views, 1.0, self._device.stream(stream))

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

    def ring_difference(
        self,
        x: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        agreed: torch.Tensor,
        shares: tuple[float, float],
        stream: Stream,
    ) -> None:
        """``x = (x - agreed) + (left - agreed) * shares[0] + (right - agreed) * shares[1]``."""
        own, tensors = self._device.stream(stream), (x, left, right, agreed, x)
        pointers = tuple(map(torch.Tensor.data_ptr, tensors))
        self._launch(
            own, self._variant("ring_difference", x.dtype), self._packs(x), (*pointers, x.numel(), *shares)
        )
        self._device.record_holding(own, tensors)

    def add_difference(self, x: torch.Tensor, mean: torch.Tensor, y: torch.Tensor, stream: Stream) -> None:
        """``x += mean - y``; `mean` itself, bit for bit, where x is still y."""
        own, tensors = self._device.stream(stream), (x, mean, y)
        pointers = tuple(map(torch.Tensor.data_ptr, tensors))
        self._launch(own, self._variant("add_difference", x.dtype), self._packs(x), (*pointers, x.numel()))
        self._device.record_holding(own, tensors)

    def _packs(self, t: torch.Tensor) -> int:
        """Blocks of a kernel whose threads take 16 bytes at a time."""
        return self._blocks(-(-t.nbytes // (16 * THREADS)))

    def _scratch(self, stream: CudaStream, size_bytes: int) -> torch.Tensor:
        """Memory that belongs to `stream`, the same each time: its kernels run one after the other.

        When more is needed, the old memory lives on in the events of the kernels that use it.
        """
        if stream.scratch is None or stream.scratch.numel() < size_bytes:
            stream.scratch = self._device.torch_side.empty_on(stream.handle, size_bytes)
        return stream.scratch

    # ---- launches

    def _variant(self, operation: str, *dtypes: torch.dtype) -> Variant:
        key = (operation, *(_NAMES.get(dtype, str(dtype)) for dtype in dtypes))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = Variant.of(*key)
        return variant

    def _blocks(self, wanted: int) -> int:
        return min(wanted, self._blocks_at_most)

    def _launch(
        self,
        stream: CudaStream,
        variant: Variant,
        blocks: int,
        arguments: tuple[int | float, ...],
        operation: str = "",
    ) -> None:
        """Launch a kernel where there is work for it; the caller keeps its memory alive."""
        if not blocks:
            return
        self._device.require_open(stream)
        self._device.enter()
        kernel = self._cache.kernel(variant, operation)
        config = self._config(grid=blocks, block=THREADS)
        try:
            self._launch_raw(stream.raw, config, kernel, *arguments)
        except Exception as error:
            raise cuda_error(f"the launch of {operation or variant.entry()}", error) from error
