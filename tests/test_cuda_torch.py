"""How torch on a GPU is met: by what torch.cuda is asked for, and by work on its default stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from bagua_rt.backends._cuda_torch import CudaTorch
from bagua_rt.config import RuntimeConfig
from tests.emulator import product
from tests.ranks import RankContext, RankPool

DEVICE = torch.device("cuda", 1)
LANE = 0x5581_2000


class Recorded:
    """torch.cuda, as far as it is used: notes which stream is current when something runs."""

    def __init__(self) -> None:
        self.current = "none"
        self.ran: list[tuple[str, object]] = []

    def default_stream(self, device: torch.device) -> str:
        return f"default of {device}"

    def external(self, handle: int, device: torch.device) -> str:
        # As torch does: a pointer of 0 is no pointer.
        return f"{handle:#x} of {device}" if handle else "one of the pool"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty(self, size: int, **options: Any) -> object:
        self.ran.append((self.current, (size, options["dtype"], options["device"])))
        return None

    def work(self) -> None:
        self.ran.append((self.current, torch.is_grad_enabled()))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_stream", recorded.default_stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", recorded.external)
    monkeypatch.setattr(torch.cuda, "stream", recorded.stream)
    monkeypatch.setattr(torch, "empty", recorded.empty)
    return recorded


@pytest.mark.parametrize(("handle", "right"), [(0, "default of cuda:1"), (LANE, f"{LANE:#x} of cuda:1")])
def test_torch_runs_and_allocates_on_the_stream_that_is_meant(
    cuda: Recorded, handle: int, right: str
) -> None:
    side = CudaTorch(1)
    calls: list[Callable[[], object]] = [
        lambda: side.run(handle, cuda.work),
        lambda: side.empty_on(handle, 24),
    ]
    for call in calls:
        call()
    assert cuda.ran == [(right, False), (right, (24, torch.uint8, DEVICE))]
    assert cuda.current == "none"


def test_the_current_stream_is_the_devices_own(cuda: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 10 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    side = CudaTorch(1)
    assert side.current_stream() == 11
    assert side.is_capturing()


def on_the_default_stream(ctx: RankContext) -> tuple[int, int, list[float]]:
    """The compute stream's handle, that of cuda.core's stream, and what a kernel there has written."""
    from bagua_rt.backends.cuda import open_cuda
    from tests.emulator.torch_side import EmulatedTorch

    with mock.patch.object(EmulatedTorch, "current_stream", return_value=0):
        backend = open_cuda(
            0, timeout_s=20.0, config=RuntimeConfig.from_environment(), torch_side=EmulatedTorch(0)
        )
        stream: Any = backend.device.compute_stream()
        out = torch.zeros(3)
        backend.kernels.copy_in([torch.ones(3)], [out], 0.5, stream)
        backend.device.synchronize(backend.device.record(stream))
        backend.close()
    assert not product.findings()
    return stream.handle, int(stream.raw.handle), out.tolist()


def test_torchs_default_stream_is_the_legacy_one_whatever_cuda_core_is_told() -> None:
    told = {"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}
    (found,) = RankPool(1, {**product.environment(base={}), **told}).run(on_the_default_stream)
    assert found == (0, 1, [0.5, 0.5, 0.5])
