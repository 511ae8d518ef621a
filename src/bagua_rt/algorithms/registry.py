"""Algorithms by name."""

from __future__ import annotations

from typing import Any, TypeVar

from bagua_rt.algorithms.async_model_average import AsyncModelAverage
from bagua_rt.algorithms.base import Algorithm
from bagua_rt.algorithms.bytegrad import ByteGrad
from bagua_rt.algorithms.decentralized import Decentralized
from bagua_rt.algorithms.fourbit import FourBit
from bagua_rt.algorithms.gradient_allreduce import GradientAllReduce
from bagua_rt.algorithms.local_sgd import LocalSGD
from bagua_rt.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua_rt.algorithms.onebit_adam import OneBitAdamAlgorithm
from bagua_rt.algorithms.powersgd import PowerSGD
from bagua_rt.algorithms.qadam import QAdamAlgorithm
from bagua_rt.errors import UsageError

_registered: dict[str, type[Algorithm]] = {
    kind.name: kind
    for kind in (
        GradientAllReduce,
        ByteGrad,
        Decentralized,
        LocalSGD,
        LowPrecisionDecentralized,
        OneBitAdamAlgorithm,
        QAdamAlgorithm,
        PowerSGD,
        FourBit,
        AsyncModelAverage,
    )
}

_Kind = TypeVar("_Kind", bound=type[Algorithm])


def register(kind: _Kind) -> _Kind:
    """Let `create` know an algorithm by its class's ``name``; also a class decorator.

    A class that is defined again (a notebook's cell) replaces what it was.

    Raises:
        UsageError: it is no Algorithm class with a name, or the name is taken by another class.
    """
    name = getattr(kind, "name", None)
    if not isinstance(kind, type) or not issubclass(kind, Algorithm) or not isinstance(name, str):
        raise UsageError(
            "register() got no algorithm", expected="a subclass of Algorithm with a name", got=repr(kind)
        )
    taken = _registered.get(name, kind)
    if (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise UsageError(f"the name {name!r} is taken", expected="a new name", got=f"{taken.__qualname__}'s")
    _registered[name] = kind
    return kind


def create(name: str, **settings: Any) -> Algorithm:
    """Make an algorithm from its name.

    Args:
        name: One of `names`.
        settings: Its arguments.

    Raises:
        UsageError: there is no such algorithm, or it has no such argument.
    """
    kind = _registered.get(name)
    if kind is None:
        raise UsageError(f"no algorithm is named {name!r}", expected=f"one of {', '.join(names())}")
    try:
        return kind(**settings)
    except TypeError as error:
        raise UsageError(f"{name} can't be made with {settings}", got=str(error)) from error


def names() -> tuple[str, ...]:
    """The names that `create` knows."""
    return tuple(sorted(_registered))
