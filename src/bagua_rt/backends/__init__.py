"""Implementations of the seam, and the one place that chooses between them."""

from __future__ import annotations

import ctypes
import importlib.util

import torch

from bagua_rt.backend import Backend
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import BackendUnavailableError, UsageError

__all__ = ["open_backend"]


def open_backend(
    device: str | torch.device | None,
    *,
    timeout_s: float,
    config: RuntimeConfig,
    local_rank: int,
) -> Backend:
    """Open the backend of a device.

    Args:
        device: "cpu", "cuda" (the device `local_rank`), "cuda:1"; None takes "cuda" where the driver finds
            a device, else "cpu".
        timeout_s: The deadline of every host wait that names none.
        config: The settings from the environment.
        local_rank: This process's rank on its node.

    Returns:
        The backend; release it with its ``close``.

    Raises:
        BackendUnavailableError: what was asked for is not there; the text lists what was looked for.
        UsageError: no backend is for this device, or the deadline is not a number above 0.
    """
    if not timeout_s > 0:
        raise UsageError(
            "timeout_s is not usable", expected="a number of seconds above 0", got=repr(timeout_s)
        )
    if device is None:
        device = "cuda" if _cuda_device_count() > 0 else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError("this is not a device", expected='"cpu" or "cuda"', got=repr(device)) from error
    if chosen.type == "cpu":
        from bagua_rt.backends.gloo import open_gloo

        return open_gloo(timeout_s=timeout_s)
    if chosen.type == "cuda":
        return _open_cuda(chosen, timeout_s, config, local_rank)
    raise UsageError("no backend is for this device", expected='"cpu" or "cuda"', got=repr(str(chosen)))


def _open_cuda(device: torch.device, timeout_s: float, config: RuntimeConfig, local_rank: int) -> Backend:
    count = _cuda_device_count()
    index = local_rank if device.index is None else device.index
    bindings = importlib.util.find_spec("cuda") is not None and (
        importlib.util.find_spec("cuda.bindings") is not None
    )
    if index >= count or not bindings:
        found = (
            f"libcuda.so.1 {'loads' if count >= 0 else 'does not load'}",
            f"{max(count, 0)} CUDA device(s), index {index} is asked for",
            f"cuda-bindings {'is' if bindings else 'is not'} installed",
        )
        raise BackendUnavailableError(
            f"the device {str(device)!r} is not usable",
            expected="a CUDA driver, a device, and the extra cu12 or cu13",
            got=", ".join(found),
            fix='install the driver and bagua_rt[cu12] or [cu13], or ask for "cpu"',
        )
    from bagua_rt.backends.cuda import open_cuda

    return open_cuda(index, timeout_s=timeout_s, config=config)


def _cuda_device_count() -> int:
    """Number of devices that the driver finds; -1 where there is no driver library.

    Asks the driver alone: ``torch.cuda`` would refuse on a CPU build of torch and start a context elsewhere.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return -1
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
