"""What the kernel tests run in a process on the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import emulator
from .helpers import KERNELS
from .native import INVALID_VALUE, Array, Cuda, Pointer, launch_parameters


def compile_source(source: str, arch: str = "sm_90", form: str = "cubin") -> bytes:
    """By real NVRTC."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", device_as_default_execution_space=True)
    code = Program(source, "c++", options).compile(form).code
    assert isinstance(code, bytes)
    return code


class Kernels:
    """A .cu file of the tests, compiled by NVRTC and loaded."""

    def __init__(self, file: str) -> None:
        self.cuda = Cuda()
        self.stream = self.cuda.stream()
        self.module = Pointer()
        self.image = compile_source((KERNELS / file).read_text())
        self.cuda.call("cuModuleLoadData", ctypes.byref(self.module), self.image)

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args: Sequence[Any],
        shared: int = 0,
        stream: int | None = None,
    ) -> int:
        function = Pointer()
        self.cuda.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        params, _kept = launch_parameters(args)
        return self.cuda.code(
            "cuLaunchKernel",
            *(function, grid, 1, 1, block, 1, 1, shared),
            *(self.stream if stream is None else stream, params.ctypes.data, None),
        )


def pointer_to(value: int) -> Any:
    return ctypes.c_void_p(value)


# ---- correct kernels ---------------------------------------------------------------------------


def quantised(x: Array, chunk: int) -> Array:
    """What quantize_u8 states, in numpy."""
    f32 = np.float32
    codes = []
    for begin in range(0, len(x), chunk):
        part = x[begin : begin + chunk]
        scale = (part.max() - part.min()) / f32(255)
        inverse = f32(1) / scale if scale > 0 else f32(0)
        codes.append(np.rint((part - part.min()) * inverse).astype(np.uint8))
    return np.concatenate(codes)


def run_quantiser(_rank: int, _world: int) -> list[bool]:
    kernels = Kernels("sample.cu")
    cuda = kernels.cuda
    rng = np.random.default_rng()
    equal = []
    for n, chunk in ((1, 1024), (1000, 1024), (4096, 1024), (10001, 777)):
        x = rng.standard_normal(n).astype(np.float32)
        chunks = -(-n // chunk)
        pointers = [cuda.upload(x), cuda.alloc(n), cuda.alloc(chunks * 4), cuda.alloc(chunks * 4)]
        largest = cuda.upload(np.zeros(1, np.int32))
        args = [pointer_to(p) for p in pointers]
        args += [ctypes.c_int64(n), ctypes.c_int(chunk), pointer_to(largest)]
        assert kernels.launch("quantize_u8", chunks, 256, args) == 0
        cuda.sync(kernels.stream)
        codes = cuda.download(pointers[1], np.empty(n, np.uint8))
        equal.append(bool((codes == quantised(x, chunk)).all()))
    return equal


def run_other_kernels(_rank: int, _world: int) -> dict[str, bool]:
    kernels = Kernels("sample.cu")
    cuda = kernels.cuda
    rng = np.random.default_rng()
    done = {}

    rows, vectors = 5, 96
    x = rng.standard_normal((rows, vectors * 8)).astype(np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    out = cuda.alloc(rows * 4)
    args = [pointer_to(cuda.upload(bits)), pointer_to(out), ctypes.c_int(vectors)]
    assert kernels.launch("row_sums_bf16", rows, 256, args, shared=1024) == 0
    assert kernels.launch("row_sums_bf16", rows, 512, args, shared=2048) == INVALID_VALUE
    cuda.sync(kernels.stream)
    sums = cuda.download(out, np.empty(rows, np.float32))
    done["dynamic shared memory"] = bool(np.allclose(sums, exact.sum(1), atol=1e-3))

    values = rng.integers(0, 100, 10_000).astype(np.float32)
    out = cuda.alloc(4)
    counter = cuda.upload(np.zeros(1, np.uint32))
    pointers = [cuda.upload(values), cuda.alloc(64), out, counter]
    args = [*map(pointer_to, pointers), ctypes.c_int(len(values))]
    assert kernels.launch("sum_by_last_block", 16, 256, args) == 0
    cuda.sync(kernels.stream)
    total = cuda.download(out, np.empty(1, np.float32))[0]
    done["last block"] = bool(total == values.sum())

    numbers = rng.standard_normal(1000)
    pointer = cuda.upload(numbers)
    args = [pointer_to(pointer), ctypes.c_double(3), ctypes.c_int64(1000)]
    assert kernels.launch("scale_f64", 4, 256, args) == 0
    cuda.sync(kernels.stream)
    done["kernel made by a macro"] = bool((cuda.download(pointer, numbers) == numbers * 3).all())
    return done


# ---- planted bugs ------------------------------------------------------------------------------

# name -> grid, block, dynamic shared memory, and a part of the message
PLANTED: dict[str, tuple[int, int, int, str]] = {
    "missing_barrier": (1, 64, 0, "same shared memory"),
    "missing_barrier_in_loop": (1, 64, 256, "same shared memory"),
    "missing_warp_barrier": (1, 32, 0, "same shared memory"),
    "divergent_barrier": (1, 64, 0, "reached by 40 of 64"),
    "two_barriers": (1, 64, 0, "different __syncthreads"),
    "divergent_shuffle": (1, 64, 0, "not every lane"),
    "caller_not_in_mask": (1, 64, 0, "does not name the calling lane"),
    "source_not_in_mask": (1, 64, 0, "reads lane 20"),
    "blocks_write_one_cell": (4, 64, 0, "two blocks"),
    "block_reads_neighbour": (4, 1, 0, "two blocks"),
    "plain_beside_atomic": (4, 1, 0, "two blocks"),
    "misaligned_vector": (1, 1, 0, "not a multiple"),
    "misaligned_load": (1, 1, 0, "not a multiple"),
    "beyond_allocation": (1, 1, 0, "touches bytes [4096, 4100) of an allocation of 4096"),
    "beyond_shared": (1, 64, 64, "dynamic shared memory accessed at byte"),
}


def run_planted(_rank: int, _world: int) -> dict[str, tuple[int, list[str]]]:
    kernels = Kernels("planted_bugs.cu")
    results = {}
    for name, (grid, block, shared, _) in PLANTED.items():
        pointer = kernels.cuda.upload(np.zeros(1024, np.int32))
        args = [pointer_to(pointer)]
        if name == "misaligned_load":
            args.append(pointer_to(pointer + 2048))
        if name == "beyond_allocation":
            args.append(ctypes.c_int(1024))
        assert kernels.launch(name, grid, block, args, shared) == 0
        code = kernels.cuda.code("cuStreamSynchronize", kernels.stream)
        again = kernels.cuda.code("cuStreamSynchronize", kernels.stream)
        assert again == code, "the error is sticky"
        results[name] = code, emulator.reports("kernel")
        emulator.reset()
    return results


def run_fresh_shared(_rank: int, _world: int) -> bool:
    kernels = Kernels("planted_bugs.cu")
    pointer = kernels.cuda.alloc(128)
    kernels.launch("reads_fresh_shared", 1, 32, [pointer_to(pointer)])
    kernels.cuda.sync(kernels.stream)
    return bool(np.isnan(kernels.cuda.download(pointer, np.empty(32, np.float32))).all())


# ---- images ------------------------------------------------------------------------------------


def run_images(_rank: int, _world: int) -> dict[str, Any]:
    cuda = Cuda()
    module, function = Pointer(), Pointer()
    source = (KERNELS / "sample.cu").read_text()

    def load(image: bytes) -> int:
        return cuda.code("cuModuleLoadData", ctypes.byref(module), image)

    def get(name: bytes) -> int:
        return cuda.code("cuModuleGetFunction", ctypes.byref(function), module, name)

    wider = source.replace("float a, int n", "float a, i64 n")
    assert wider != source
    return {
        "cubin": load(compile_source(source)),
        "function": get(b"add_scalar"),
        "made by a macro": get(b"scale_f32"),
        "unknown function": get(b"nope"),
        "PTX": load(compile_source(source, form="ptx")),
        "function of PTX": get(b"quantize_u8"),
        "older minor version": load(compile_source(source, "sm_80")),
        "other architecture": load(compile_source(source, "sm_75")),
        "architecture of another ABI": load(compile_source(source, "sm_100")),
        "other parameter sizes": load(compile_source(wider)),
        "other parameter sizes, PTX": load(compile_source(wider, form="ptx")),
        "garbage": load(b"garbage" * 20),
    }


def run_cuda_core(_rank: int, _world: int) -> dict[str, Any]:
    """What the product uses: cuda.core objects, unchanged."""
    from cuda.core import Device, EventOptions, LaunchConfig, Program, ProgramOptions, launch

    emulator.assert_loaded()
    device = Device()
    device.set_current()
    stream, other = device.create_stream(), device.create_stream()
    options = ProgramOptions(arch="sm_90", std="c++17")
    module = Program((KERNELS / "sample.cu").read_text(), "c++", options).compile("cubin")
    kernel = module.get_kernel("add_scalar")
    buffer = device.allocate(400, stream=stream)
    pointer = int(buffer.handle)
    cuda = Cuda()
    cuda.call("cuMemsetD32Async", pointer, 0, 100, int(stream.handle))
    event = stream.record(options=EventOptions(timing_enabled=False))
    other.wait(event)
    config = LaunchConfig(grid=1, block=128)
    launch(other, config, kernel, pointer, ctypes.c_float(2), ctypes.c_int(100))
    stream.wait(other)
    out = np.empty(100, np.float32)
    cuda.call("cuMemcpyDtoHAsync", out.ctypes.data, pointer, 400, int(stream.handle))
    stream.sync()
    done = event.is_done
    buffer.close(stream)
    return {
        "values": bool((out == 2).all()),
        "done": done,
        "parameters": [(p.offset, p.size) for p in kernel.arguments_info],
        "name": device.name,
        "cc": tuple(device.compute_capability),
    }
