"""The product on the emulator: the environment of a process that opens the CUDA backend, and how it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import build, emulator

OPERATIONS = (
    *("copy_in", "copy_out", "sign_encode", "sign_decode", "sign_decode_mean"),
    *("minmax_encode", "minmax_decode", "minmax_decode_mean"),
)


def kernels() -> Path:
    """A folder of the texts that the product has compiled, for g++."""
    from bagua_rt.backends._nvrtc import variants

    folder = build.cache_directory() / "product_kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for variant in variants():
        if variant.operation in OPERATIONS:
            path, text = folder / f"{variant.entry()}.cu", variant.source()
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
