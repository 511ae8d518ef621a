"""What the emulator's own tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .ranks import run_emulated

KERNELS = Path(__file__).resolve().parent / "kernels"


def on_emulator(function: Callable[..., object], *args: object, **settings: Any) -> Any:
    """Runs a function in a fresh process on the emulator, and returns its result."""
    assert "<" not in function.__qualname__, "processes find functions by name: define it at module level"
    return run_emulated(function, 1, *args, **settings)[0].value
