"""`DistributedDataParallel`: `attach` in the shape of torch's wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn

from bagua_rt.algorithms.base import Algorithm
from bagua_rt.attach.attach import attach
from bagua_rt.attach.attached import Attached
from bagua_rt.errors import UsageError
from bagua_rt.process_group import ProcessGroup


class DistributedDataParallel(nn.Module):
    """A module that wraps another and trains it data-parallel; its state_dict keys start with ``module.``.

    Arguments that torch's class has and that decide nothing here are taken and checked; see `attach` for
    the others.

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
        if unknown := sorted(set(options) - set(signature(attach).parameters)):
            raise UsageError(
                f"DistributedDataParallel() takes no argument {unknown[0]!r}",
                expected="those of torch's that docs/coming-from.md lists, and those of attach()",
            )
        if not init_sync:
            raise UsageError("init_sync=False is not supported", expected="ranks that start as rank 0 does")
        if device_ids is not None and len(device_ids) > 1:
            raise UsageError(
                "device_ids names several devices",
                expected="one process for each device",
                got=repr(list(device_ids)),
                fix="start one rank per device with torchrun",
            )
        self.module = module
        self._attached: Attached = attach(
            module,
            optimizers,
            algorithm,
            process_group=process_group,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **options,
        )

    @property
    def attached(self) -> Attached:
        """The handle that `attach` gave."""
        return self._attached

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As `Attached.no_sync`."""
        with self._attached.no_sync():
            yield
