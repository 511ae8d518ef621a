"""Tensors in a few bytes: for comparing what ranks hold without sending it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bagua_rt.attach.agreement import Line


def fingerprint(tensor: torch.Tensor | None) -> str:
    """A text that differs where the bits differ. Waits for the device, and copies to the host."""
    if tensor is None:
        return "none"
    data = tensor.detach()
    if data.layout is torch.sparse_coo:
        data = data.coalesce()
        return f"{fingerprint(data.indices())} {fingerprint(data.values())}"
    flat = data.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def of_weights(named: Mapping[str, torch.Tensor]) -> list[Line]:
    """The fingerprints of parameters, by name."""
    return [(f"the bits of {name!r}", fingerprint(param)) for name, param in named.items()]


def of_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]
) -> list[Line]:
    """The fingerprints of the optimizers' states, by parameter."""
    lines: list[Line] = []
    for number, optimizer in enumerate(optimizers):
        for param, state in optimizer.state.items():
            of = f"of {names[param]!r} in optimizer {number}" if param in names else f"in optimizer {number}"
            lines += [(f"the state {key!r} {of}", _text(value)) for key, value in _entries(state)]
    return sorted(lines)


def _entries(state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        yield from ((str(key), value) for key, value in state.items())


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return fingerprint(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
