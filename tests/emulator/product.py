"""The product on the emulator: the environment of a process that opens the CUDA backend, and how it does."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bagua_rt.backend import Backend

from . import build, emulator

OPERATIONS = (
    *("copy_in", "copy_out", "sign_encode", "sign_decode", "sign_decode_mean"),
    *("minmax_encode", "minmax_decode", "minmax_decode_mean", "ring_difference", "add_difference"),
)


def kernels(
    operations: Collection[str] = OPERATIONS, elements: Collection[str] = (), name: str = "product_kernels"
) -> Path:
    """A folder of the texts that the product has compiled, for g++; of some element types, or of all."""
    from bagua_rt.backends._nvrtc import variants

    texts = {
        variant.entry(): variant.source()
        for variant in variants()
        if variant.operation in operations and (not elements or set(variant.elements) <= set(elements))
    }
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = build.cache_directory() / f"{name}-{digest}"  # other texts, as another checkout's, lie elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    for entry, text in texts.items():
        path = folder / f"{entry}.cu"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return folder


def environment(**settings: Any) -> dict[str, str]:
    """`emulator.environment()` with four devices and the product's kernels."""
    return emulator.environment(**{"ndev": 4, "kernels": [kernels()], **settings})


def install() -> None:
    """Let ``open_backend("cuda")`` of this process meet CPU tensors where it would meet torch on a GPU."""
    from bagua_rt.backends import cuda

    from .torch_side import EmulatedTorch

    emulator.assert_loaded()
    vars(cuda)["CudaTorch"] = EmulatedTorch


@contextmanager
def computing(backend: Backend) -> Iterator[None]:
    """Let the body's torch operations run on the compute stream of an emulated backend."""
    device: Any = backend.device
    with device.torch_side.on_compute_stream():
        yield


def findings() -> list[str]:
    """What the emulator has reported since it was last asked, once all streams are idle."""
    found = [] if emulator.drain() else ["a stream that is stuck"]
    found += emulator.reports()
    emulator.reset()
    return found
