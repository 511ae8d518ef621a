"""Keeping torch.compile out of hooks: a compiled training step calls them, but must not trace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._dynamo.decorators import skip

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Run `function`, and what it calls, as it is, in a compiled step too."""
    return cast("_Function", torch.compiler.disable(function))


def untraced_frame(function: _Function) -> _Function:
    """Run `function` itself as it is; costs nothing per call, but leaves alone what it calls.

    `torch.compiler.disable(recursive=False)` would wrap it, at half the cost of the hook it is used for.
    """
    return cast("_Function", skip(function))
