"""The one place where torch and the CUDA backend meet: addresses, dtypes, the current stream.

The backend knows streams as handles and tensors as addresses. What it asks of torch is `TorchSide`; tests
replace it where there is no GPU, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from bagua_rt.errors import BackendUnavailableError


class TorchSide(Protocol):
    """What the CUDA backend needs of torch."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors are."""
        ...

    def current_stream(self) -> int:
        """The handle of the stream that the calling thread's torch operations go to."""
        ...

    def is_capturing(self) -> bool:
        """Is that stream being captured into a CUDA graph?"""
        ...

    def run(self, stream: int, fn: Callable[[], object]) -> None:
        """Call `fn` on this thread, its torch operations queued on the stream with this handle."""
        ...

    def empty_on(self, stream: int, size_bytes: int) -> torch.Tensor:
        """Fresh memory whose first use is on the stream with this handle."""
        ...


class CudaTorch:
    """torch on a CUDA device.

    Args:
        index: The device.

    Raises:
        BackendUnavailableError: this torch has no such device.
    """

    def __init__(self, index: int) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            raise BackendUnavailableError(
                f"torch can't use the CUDA device {index}",
                expected="a torch that is built for CUDA and sees the device",
                got=f"torch {torch.__version__}, which sees {count} CUDA device(s)",
                fix='install a CUDA build of torch, or ask for "cpu"',
            )
        self._index = index
        self.torch_device = torch.device("cuda", index)

    def current_stream(self) -> int:
        """The handle of the stream that the calling thread's torch operations go to."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def is_capturing(self) -> bool:
        """Is the current stream being captured into a CUDA graph?"""
        return torch._C._cuda_isCurrentStreamCapturing()

    def run(self, stream: int, fn: Callable[[], object]) -> None:
        """Call `fn` on this thread, its torch operations queued on the stream with this handle."""
        with torch.cuda.stream(self._stream(stream)), torch.no_grad():
            fn()

    def empty_on(self, stream: int, size_bytes: int) -> torch.Tensor:
        """Fresh memory whose first use is on the stream with this handle."""
        with torch.cuda.stream(self._stream(stream)):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def _stream(self, handle: int) -> torch.cuda.Stream:
        """Torch's stream with this handle; for 0, ExternalStream would give one of torch's pool."""
        if not handle:
            return torch.cuda.default_stream(self.torch_device)
        return torch.cuda.ExternalStream(handle, device=self.torch_device)
