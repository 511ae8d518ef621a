"""What the emulator and its host allocate is no race; what two streams share is one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from . import emulator
from .helpers import KERNELS, on_emulator
from .torch_side import EmulatedTorch

BYTES = 48  # three arguments, in the emulator's copy of them
MANY = 100


def nothing() -> None:
    pass


def run_reuse(_rank: int, _world: int) -> dict[str, Any]:
    """Memory that one stream has written and the host has freed is given to another stream."""
    from .rank_kernels import Kernels

    kernels = Kernels("sample.cu")
    one, two = kernels.cuda.stream(), kernels.cuda.stream()
    side, found = EmulatedTorch(0), {}

    def races(name: str) -> None:
        emulator.drain()
        found[name] = emulator.race_reports().count
        emulator.reset()

    def launch(x: torch.Tensor) -> None:
        args = ctypes.c_void_p(x.data_ptr()), ctypes.c_float(1), ctypes.c_int(x.numel())
        kernels.launch("add_scalar", 1, 64, args, stream=two)

    x = torch.ones(64)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(BYTES) for _ in range(MANY)]
    emulator.run_on_stream(one, nothing, writes=[(block, BYTES) for block in blocks])
    emulator.drain()
    for block in blocks:
        libc.free(block)
    launch(x)
    races("arguments of a launch")

    used = [torch.empty(4096, dtype=torch.uint8) for _ in range(MANY)]
    places = {t.data_ptr() for t in used}
    emulator.run_on_stream(one, nothing, writes=used)
    emulator.drain()
    used.clear()
    lanes = [side.empty_on(two, 4096) for _ in range(MANY)]
    found["places used again"] = len(places & {t.data_ptr() for t in lanes})
    emulator.run_on_stream(two, nothing, writes=lanes)
    races("memory of a lane")

    places = {t.data_ptr() for t in lanes}
    lanes.clear()
    found["a lane's places used again"] = len(
        places & {torch.empty(4096 // 4).data_ptr() for _ in range(MANY)}
    )

    with side.on_compute_stream():
        scale, growth = torch.ones(1), torch.zeros((), dtype=torch.int32)
        before = scale._version
        same = torch._amp_update_scale_(scale, growth, torch.ones(1), 2.0, 0.5, 2000)
    emulator.drain()
    found["two are written, one is returned"] = same is scale and scale.item() == 0.5
    found["versions"] = scale._version - before

    side.run(one, lambda: x.add_(1))
    launch(x)
    races("a tensor of two lanes")
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = on_emulator(run_reuse, expect=["race"], quiet=True, kernels=[KERNELS])
    assert isinstance(result, dict)
    return result


def test_what_is_used_again_is_no_race(found: dict[str, Any]) -> None:
    assert found["arguments of a launch"] == 0
    assert found["places used again"] > 0
    assert found["memory of a lane"] == 0
    assert found["a lane's places used again"] == 0


def test_an_operation_in_place_counts_the_version_once(found: dict[str, Any]) -> None:
    assert found["two are written, one is returned"]
    assert found["versions"] == 1


def test_what_two_lanes_share_is_one(found: dict[str, Any]) -> None:
    assert found["a tensor of two lanes"] > 0
