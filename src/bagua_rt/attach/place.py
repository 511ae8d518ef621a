"""Where a thread of this process is in the trainer's own code."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).parents[1])
_TORCHS = str(Path(torch.__file__).parent)


def place_of(thread: int) -> str:
    """``train.py:31 in main``: the innermost line outside of torch and this package, or of all if none is."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCHS, "<")):
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
