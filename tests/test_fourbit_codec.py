"""FourBit's codec by its formula. No ranks here, which would have to import hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagua_rt.algorithms.fourbit import FourBitCodec
from tests.zoo import Array


class _Inline:
    """A device whose streams are the caller."""

    def run(self, stream: object, fn: Any) -> None:
        fn()


def roundtrip(values: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    codec = FourBitCodec(_Inline())  # type: ignore[arg-type]
    rows, columns = values.shape
    wire = torch.full((rows, codec.row_bytes(columns, values.dtype)), 255, dtype=torch.uint8)
    out = torch.empty_like(values)
    codec.encode(values, error, values.numel(), 0, wire, None)  # type: ignore[arg-type]
    codec.decode(wire, out, None)  # type: ignore[arg-type]
    return out


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, (2, 128), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_the_codecs_error_is_half_a_step(values: Array) -> None:
    out = roundtrip(torch.from_numpy(values)).numpy().astype(np.float64)
    exact = values.astype(np.float64)
    step = np.abs(exact).reshape(2, 2, 64).max(2) / 7
    wrong = np.abs(out - exact).reshape(2, 2, 64).max(2)
    assert (wrong <= np.maximum(step * 0.500001, 7 * np.finfo(np.float32).tiny)).all()
    assert (out[values == 0] == 0).all(), "zero is exact"


def test_a_mean_overflows_only_where_it_is_too_large_itself() -> None:
    values, codec = torch.full((3, 64), 3e38), FourBitCodec(_Inline())  # type: ignore[arg-type]
    wire = torch.empty(3, codec.row_bytes(64, values.dtype), dtype=torch.uint8)
    mean = torch.empty(64)
    codec.encode(values, None, 64, 0, wire, None)  # type: ignore[arg-type]
    codec.decode_mean(wire, mean, None)  # type: ignore[arg-type]
    torch.testing.assert_close(mean, values[0])


def test_the_wires_bytes() -> None:
    values = torch.zeros(1, 64)
    values[0, :4] = torch.tensor([7.0, -7.0, 1.0, -3.0])
    codec = FourBitCodec(_Inline())  # type: ignore[arg-type]
    wire = torch.empty(1, 36, dtype=torch.uint8)
    codec.encode(values, None, 64, 0, wire, None)  # type: ignore[arg-type]
    assert bytes(wire[0].tolist()) == bytes([0, 0, 128, 63, 0x1F, 0x59]) + bytes([0x88] * 30)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_block_that_is_not_finite_is_lost_and_leaves_no_error(dtype: torch.dtype, value: float) -> None:
    values = torch.linspace(-1, 1, 192).to(dtype)[None].clone()
    values[0, 70] = value
    error = torch.full((1, 192), 0.25, dtype=torch.promote_types(dtype, torch.float32))
    out = roundtrip(values, error)
    assert out[0, 64:128].isnan().all()
    assert out[0, :64].isfinite().all()
    assert out[0, 128:].isfinite().all()
    assert error.isfinite().all()
    assert (error[0, 64:128] == 0).all()
