"""The launches of the fused operations on CUDA: how many, how large, and in whose context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_rt.backend import Stream, Views
from bagua_rt.backends._nvrtc import _cuda as import_cuda
from bagua_rt.errors import ClosedError
from tests.contract.world import World, world
from tests.emulator import product
from tests.ranks import RankContext, RankPool

Call = Callable[[Stream], object]


class Launches:
    """Stands before cuda.core's launch: the grids, and the device whose context was the thread's."""

    def __init__(self, kernels: Any) -> None:
        self._launch, self._device = kernels._launch_raw, import_cuda("core").Device
        self.grids: list[int] = []
        self.devices: set[int] = set()
        kernels._launch_raw = kernels._copies._launch = self

    def __call__(self, stream: Any, config: Any, kernel: Any, *arguments: Any) -> None:
        self.grids.append(config.grid[0])
        self.devices.add(self._device().device_id)
        self._launch(stream, config, kernel, *arguments)

    def of(self, call: Call, stream: Stream) -> list[int]:
        self.grids.clear()
        call(stream)
        return list(self.grids)


def calls(w: World, rows: int, columns: int) -> dict[str, Call]:
    kernels, dev = w.backend.kernels, w.device.torch_device

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=dev)

    values, mean, n = zeros(rows, columns), zeros(columns), rows * columns
    views = Views([zeros(columns)])
    signs = zeros(rows, 8 + columns // 8, dtype=torch.uint8)
    codes = zeros(rows, kernels.minmax_row_bytes(columns, torch.float32), dtype=torch.uint8)
    return {
        "copy_in": lambda s: kernels.copy_in([mean], views, 0.5, s),
        "copy_out": lambda s: kernels.copy_out(views, [mean], s),
        "sign_encode": lambda s: kernels.sign_encode(values, zeros(rows, columns), n, 0, signs, s),
        "sign_decode": lambda s: kernels.sign_decode(signs, values, s),
        "sign_decode_mean": lambda s: kernels.sign_decode_mean(signs, mean, s),
        "minmax_encode": lambda s: kernels.minmax_encode(values, n, 0, codes, s),
        "minmax_decode": lambda s: kernels.minmax_decode(codes, values, s),
        "minmax_decode_mean": lambda s: kernels.minmax_decode_mean(codes, mean, s),
    }


def situations(ctx: RankContext) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with world(ctx, "emulated") as w:
        kernels: Any = w.backend.kernels
        launches, lane = Launches(kernels), w.lanes[0]
        closed = w.device.new_stream("closed")
        w.device.close_stream(closed)
        for name, call in calls(w, 2, 64).items():
            import_cuda("core").Device(1).set_current()  # as a model on two devices does
            assert launches.of(call, lane), name
            with pytest.raises(ClosedError):
                launches.of(call, closed)
            assert not launches.grids, name
        found["devices"] = launches.devices
        found["no elements"] = {name: launches.of(call, lane) for name, call in calls(w, 2, 0).items()}
        flat = w.tensor([3.0] * 12)
        square = flat[3:].view(3, 3)
        for kind in (Views, list[torch.Tensor]):
            views = kind([flat[:3], square])
            found[kind.__name__] = [
                launches.of(lambda s, views=views, scale=scale: kernels.copy_in(views, views, scale, s), lane)  # type: ignore[misc]
                for scale in (1.0, 0.5)
            ]
        kernels._blocks_at_most = 3
        found["large"] = {name: launches.of(call, lane) for name, call in calls(w, 2, 16_384).items()}
        w.device.synchronize(w.device.record(lane))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (answer,) = RankPool(1, product.environment(base={})).run(situations)
    return dict(answer)


def test_a_launch_enters_its_device_and_refuses_a_closed_stream_before(found: dict[str, Any]) -> None:
    assert found["devices"] == {0}


def test_nothing_is_launched_for_nothing(found: dict[str, Any]) -> None:
    some = {name: grids for name, grids in found["no elements"].items() if grids}
    assert some == {"sign_encode": [2, 2], "minmax_encode": [2]}, "the rows' headers"


@pytest.mark.parametrize("kind", ["Views", "list"])
def test_what_is_in_place_is_only_scaled(found: dict[str, Any], kind: str) -> None:
    assert found[kind] == [[], [2]]


def test_a_grid_is_as_large_as_the_device_and_no_larger(found: dict[str, Any]) -> None:
    exact = found["large"].pop("sign_encode")  # the order of its sum depends on the shape alone
    assert exact == [4, 4]
    assert all(grids == [3] for grids in found["large"].values()), found["large"]
