"""Operations that algorithms compose: each queues its work on one lane and returns at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from bagua_rt.algorithms.base import Context
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError
from bagua_rt.process_group import Communicators

CODEC_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What codecs carry; buckets of another dtype go through plain all-reduce."""


def refuse_unknown_steps(name: str, buckets: Sequence[Bucket], context: Context) -> None:
    """See that the attachment's optimizers hold all parameters: a step of another one would be overwritten.

    Args:
        name: The algorithm's name, for the error text.
        buckets: The parameters whose weights it moves.
        context: The attachment's.

    Raises:
        UsageError: a parameter is in no optimizer that was given to attach.
    """
    groups = [group for optimizer in context.optimizers for group in optimizer.param_groups]
    held = {id(param) for group in groups for param in group["params"]}
    for param in (param for bucket in buckets for param in bucket.params):
        if id(param) not in held:
            raise UsageError(
                f"{name} moves weights between steps, and knows no optimizer of {context.names[param]!r}",
                expected="every parameter that is trained in an optimizer that attach() was given",
                fix="give attach() that optimizer too, freeze the parameter, or name it in ignore",
            )


def sum_(flat: torch.Tensor, context: Context, stream: Stream, *, hierarchical: bool = False) -> None:
    """Sum `flat` over all ranks of an attachment, in place and in pieces as it was asked for.

    Args:
        flat: The buffer.
        context: The attachment's.
        stream: The lane.
        hierarchical: Within each node first, then among the nodes' leaders.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    if hierarchical:
        hierarchical_sum_(flat, context.communicators, stream, context.chunk_bytes)
    else:
        all_reduce_sum_(flat, context.world, stream, context.chunk_bytes)


def all_reduce_sum_(
    flat: torch.Tensor, comm: Communicator, stream: Stream, chunk_bytes: int | None = None
) -> None:
    """Sum `flat` over all ranks, in place.

    Args:
        flat: The buffer.
        comm: The ranks.
        stream: The lane.
        chunk_bytes: Most bytes in one collective; None sends everything in one.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    if chunk_bytes is None or flat.nbytes <= chunk_bytes:
        comm.all_reduce_(flat, "sum", stream=stream)
        return
    for piece in flat.view(-1).split(max(1, chunk_bytes // flat.element_size())):
        comm.all_reduce_(piece, "sum", stream=stream)


def hierarchical_(
    flat: torch.Tensor,
    communicators: Communicators,
    stream: Stream,
    among_leaders: Callable[[Communicator], None],
) -> None:
    """Sum `flat` within each node, let the leaders exchange, and give each node its leader's result.

    Args:
        flat: The buffer, replaced in place.
        communicators: The attachment's.
        stream: The lane.
        among_leaders: Queues the exchange of the leaders' sums. Not called where there is only one node.

    Raises:
        UsageError: the attachment has no intra-node communicator.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    node, leaders = communicators.intra_node, communicators.inter_node
    if node is None:
        raise UsageError(
            "the attachment has no intra-node communicator",
            fix="give the algorithm a field `hierarchical` that is true",
        )
    node.reduce_(flat, 0, "sum", stream=stream)
    if leaders is not None and leaders.world_size > 1:
        among_leaders(leaders)
    node.broadcast_(flat, 0, stream=stream)


def hierarchical_sum_(
    flat: torch.Tensor, communicators: Communicators, stream: Stream, chunk_bytes: int | None = None
) -> None:
    """Sum `flat` over all ranks, in place: within each node, among the leaders, and back.

    With scaled input (1/world_size) the result is the mean over *ranks*, for nodes of any sizes.

    Args:
        flat: The buffer.
        communicators: The attachment's.
        stream: The lane.
        chunk_bytes: Most bytes in one collective among the leaders; None sends everything in one.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    hierarchical_(
        flat, communicators, stream, lambda leaders: all_reduce_sum_(flat, leaders, stream, chunk_bytes)
    )


def views_in(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """For each parameter of `bucket`, its part of `flat`, a buffer with the bucket's places."""
    slots = bucket.plan.slots
    return [torch.as_strided(flat, slot.spec.shape, slot.spec.stride, slot.offset) for slot in slots]


def save_by_name(buckets: Sequence[Bucket], flats: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What buffers with the places of some buckets hold for each parameter; survives a re-plan."""
    return {
        name: view.clone()
        for bucket in buckets
        if bucket.index in flats
        for name, view in zip(bucket.plan.names, views_in(flats[bucket.index], bucket), strict=True)
    }


def load_by_name(
    saved: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], flats: Mapping[int, torch.Tensor]
) -> None:
    """Take up what `save_by_name` gave; parameters that are not in it keep what they have."""
    for bucket in buckets:
        if bucket.index in flats:
            for name, view in zip(bucket.plan.names, views_in(flats[bucket.index], bucket), strict=True):
                if name in saved:
                    view.copy_(saved[name])
