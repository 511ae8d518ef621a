"""Keeping torch.compile out of hooks: a compiled training step calls them, but must not trace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: list[Callable[..., Any]] = []


def untraced(function: _Function) -> _Function:
    """Run `function`, and what it calls, as it is, in a compiled step too.

    As `torch.compiler.disable`, which imports torch._dynamo at once: that would double the time of
    ``import bagua_rt``.
    """
    return cast("_Function", torch._disable_dynamo(function))


def untraced_frame(function: _Function) -> _Function:
    """Run `function` itself as it is; costs nothing per call, but leaves alone what it calls.

    `torch.compiler.disable(recursive=False)` would wrap it, at half the cost of the hook it is used for.
    It holds from `skip_frames()` on.
    """
    _frames.append(function)
    return function


def skip_frames() -> None:
    """Let torch.compile skip the functions marked by `untraced_frame`; imports torch._dynamo."""
    if _frames:
        from torch._dynamo.decorators import skip  # an optimizer has imported it before

        while _frames:
            skip(_frames.pop())
