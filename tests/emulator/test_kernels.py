"""Kernels: real NVRTC output, launched as fibers; planted kernel bugs are found."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .build import build_kernels, host_source
from .helpers import KERNELS, on_emulator
from .native import INVALID_IMAGE, INVALID_VALUE, NO_BINARY, NOT_FOUND
from .rank_kernels import (
    PLANTED,
    run_cuda_core,
    run_fresh_shared,
    run_images,
    run_other_kernels,
    run_planted,
    run_quantiser,
)

pytestmark = pytest.mark.timeout(60, func_only=True)
ON_KERNELS: dict[str, Any] = {"kernels": [KERNELS], "quiet": True}


def test_quantiser_is_bit_equal_to_numpy() -> None:
    assert on_emulator(run_quantiser, **ON_KERNELS) == [True] * 4


def test_other_correct_kernels() -> None:
    done = on_emulator(run_other_kernels, **ON_KERNELS)
    assert done == dict.fromkeys(done, True)


@pytest.fixture(scope="module")
def planted() -> dict[str, tuple[int, list[str]]]:
    result = on_emulator(run_planted, expect=["kernel"], **ON_KERNELS)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str, planted: dict[str, tuple[int, list[str]]]) -> None:
    code, texts = planted[name]
    assert code in {700, 716, 719}, "illegal address, misaligned address, launch failed"
    assert any(PLANTED[name][3] in text for text in texts), texts


def test_fresh_shared_memory_is_nan() -> None:
    assert on_emulator(run_fresh_shared, **ON_KERNELS)


def test_images_are_checked() -> None:
    assert on_emulator(run_images, expect=["kernel"], cc=86, **ON_KERNELS) == {
        "cubin": NO_BINARY,  # sm_90 on a device of 8.6
        "function": INVALID_VALUE,  # nothing is loaded
        "made by a macro": INVALID_VALUE,
        "unknown function": INVALID_VALUE,
        "PTX": 0,
        "function of PTX": 0,
        "older minor version": 0,
        "other architecture": NO_BINARY,
        "architecture of another ABI": NO_BINARY,
        "other parameter sizes": NO_BINARY,
        "other parameter sizes, PTX": INVALID_IMAGE,
        "garbage": INVALID_IMAGE,
    }
    on_90 = on_emulator(run_images, expect=["kernel"], cc=90, **ON_KERNELS)
    assert on_90["cubin"] == on_90["function"] == on_90["made by a macro"] == 0
    assert on_90["unknown function"] == NOT_FOUND
    assert on_90["other parameter sizes"] == INVALID_IMAGE
    assert on_90["older minor version"] == NO_BINARY


def test_cuda_core_runs_unchanged() -> None:
    result = on_emulator(run_cuda_core, **ON_KERNELS)
    assert result == {
        "values": True,
        "done": True,
        "parameters": [(0, 8), (8, 4), (12, 4)],
        "name": "Emulated GPU",
        "cc": (9, 0),
    }


# ---- the build of host versions ----------------------------------------------------------------


def test_every_kernel_of_the_folder_is_registered() -> None:
    text = (KERNELS / "planted_bugs.cu").read_text()
    names = re.findall(r"__global__ void (\w+)\(", text)
    marked = text.replace("__global__", "EMU_MARK_GLOBAL").replace("__shared__", "EMU_MARK_SHARED")
    assert host_source(marked)[1] == names
    assert {*PLANTED, "reads_fresh_shared"} == set(names)


def test_kernel_with_an_include_is_refused(tmp_path: Any) -> None:
    from .build import BuildError

    (tmp_path / "bad.cu").write_text("#include <stdint.h>\n")
    with pytest.raises(BuildError, match=r"stdint\.h"):
        build_kernels(tmp_path)
