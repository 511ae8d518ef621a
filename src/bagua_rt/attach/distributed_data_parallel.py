"""`DistributedDataParallel`: `attach` in the shape of torch's wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import nn

from bagua_rt.algorithms.base import Algorithm
from bagua_rt.attach.attach import attach, group_of
from bagua_rt.attach.attached import Attached
from bagua_rt.attach.resources import telling_refusals
from bagua_rt.attach.untraced import untraced
from bagua_rt.errors import UsageError
from bagua_rt.process_group import ProcessGroup, default_group


class DistributedDataParallel(nn.Module):
    """A module that wraps another and trains it data-parallel; its state_dict keys start with ``module.``.

    Arguments that torch's class has and that decide nothing here are taken and checked; see `attach` for
    the others.

    A copied or unpickled one attaches itself with the same arguments, but without optimizers, in its first
    forward for training, which is then collective; until then it is a plain module, for evaluation or a
    moving average on one rank alone. To give it optimizers, wrap its `module` anew.

    Args:
        module: The model.
        device_ids: None, or the one device that `module` is on.
        output_device: As torch has it; ignored, since outputs stay where they are.
        dim: As torch has it; ignored.
        broadcast_buffers: Make buffers rank 0's before each forward.
        init_sync: True: every rank starts as rank 0 does. False is refused.
        process_group: The ranks; None takes the default group.
        bucket_cap_mb: Most MiB in a bucket; None takes attach()'s 10.
        find_unused_parameters: May a parameter lack a gradient?
        check_reduction: As torch has it; ignored.
        gradient_as_bucket_view: Let ``.grad`` be memory of the bucket.
        static_graph: Taken; nothing needs to be known ahead here.
        optimizers: As `attach` takes them: with them, a step is only taken when its gradients are agreed.
        algorithm: How ranks communicate.
        options: Further arguments of `attach`.

    Raises:
        UsageError, LayoutMismatchError, CollectiveError: as `attach`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if bucket_cap_mb is not None:
            options["bucket_cap_mb"] = bucket_cap_mb
        with telling_refusals(group_of(process_group)):
            _check_arguments(init_sync, device_ids, options)
        self.module = module
        self._arguments: dict[str, Any] | None = {
            "process_group": process_group,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            **options,
        }
        self._attached: Attached | None = attach(module, optimizers, algorithm, **self._arguments)

    @property
    def attached(self) -> Attached:
        """The handle that `attach` gave.

        Raises:
            UsageError: this is a copy that has not trained yet, so nothing is attached.
        """
        if self._attached is None:
            raise UsageError(
                "this copy of a DistributedDataParallel is not attached",
                expected="its first forward for training, on every rank, to attach it",
                fix="call it first, or wrap its .module anew",
            )
        return self._attached

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._attached is None and self.training and torch.is_grad_enabled():
            self._attach_copy()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As `Attached.no_sync`."""
        self._attach_copy()
        with self.attached.no_sync():
            yield

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """As `Attached.join`, with torch's names.

        Args:
            divide_by_initial_world_size: Means divide by the number of all ranks; else by those with data.
            enable: False does nothing.
            throw_on_early_termination: Raise PeerError on all ranks when the first one has no more data.
        """
        self._attach_copy()
        with (
            self.attached.join(divide_by_initial_world_size, throw_on_early_termination)
            if enable
            else nullcontext()
        ):
            yield

    # ---- copies -----------------------------------------------------------------------------------------

    @untraced
    def _attach_copy(self) -> None:
        if self._attached is None and self._arguments is not None:
            self._attached = attach(self.module, **self._arguments)

    def _copied_arguments(self) -> dict[str, Any] | None:
        """What a copy attaches itself with; None where this one was closed."""
        if self._attached is None or self._arguments is None:
            return self._arguments
        return (
            None if self._attached.is_closed else {**self._arguments, "algorithm": self._attached.algorithm}
        )

    def __copy__(self) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)  # the same module, so the same attachment
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        own = {"_attached": None, "_arguments": self._copied_arguments()}
        twin.__dict__.update(
            {key: own[key] if key in own else deepcopy(value, memo) for key, value in self.__dict__.items()}
        )
        return twin

    def __getstate__(self) -> dict[str, Any]:
        arguments = self._copied_arguments()
        if arguments is not None:
            group = arguments["process_group"]
            if group is not None and not (not group.is_closed and group is default_group()):
                raise UsageError(
                    "this model can't be pickled: it trains in a process group of its own",
                    expected="the default group, which every process has after init()",
                    got=repr(group),
                    fix="pickle its .module, or save its state_dict()",
                )
            arguments = {**arguments, "process_group": None}
        return {**self.__dict__, "_attached": None, "_arguments": arguments}


def _check_arguments(
    init_sync: bool, device_ids: Sequence[int | torch.device] | None, options: Mapping[str, Any]
) -> None:
    if unknown := sorted(set(options) - set(signature(attach).parameters)):
        raise UsageError(
            f"DistributedDataParallel() takes no argument {unknown[0]!r}",
            expected="those of torch's that docs/coming-from.md lists, and those of attach()",
        )
    if not init_sync:
        raise UsageError("init_sync=False is not supported", expected="ranks that start as rank 0 does")
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise UsageError("device_ids is not usable", expected="a list of one device", got=repr(device_ids))
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError(
            "device_ids names several devices",
            expected="one process for each device",
            got=repr(list(device_ids)),
            fix="start one rank per device with torchrun",
        )
