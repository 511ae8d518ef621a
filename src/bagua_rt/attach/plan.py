"""The plan of one attachment: which parameters take part now, in which buckets, with their memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from bagua_rt.bucket import Bucket, ParameterSpec, plan_buckets, plan_digest


class Plan:
    """Buckets for some of an attachment's parameters. A parameter's index is its place among all of them.

    Args:
        names: The names of all parameters that were attached, frozen ones too.
        params: These parameters.
        order: Indices of those that take part, in the order in which their gradients become ready.
        sparse: Ids of parameters whose gradients are sparse; they take part, but in no bucket.
        cap_bytes: Most bytes in a bucket.
        first_cap_bytes: Most bytes in the first.
        alignment: What flat buffers are padded to, in elements.
        lanes: Number of lanes.

    Attributes:
        buckets: The buckets, in launch order.
        members: For each bucket, the indices of its parameters.
        sparse: Indices of the parameters whose gradients are sparse, ascending.
        bucket_of: For each parameter, its bucket; -1 where it is in none.
        digest: 8 bytes that ranks compare.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        order: Sequence[int],
        sparse: Collection[int],
        *,
        cap_bytes: int,
        first_cap_bytes: int,
        alignment: int,
        lanes: int,
    ) -> None:
        self.order = tuple(order)
        self.sparse = tuple(sorted(i for i in order if id(params[i]) in sparse))
        dense = [i for i in order if id(params[i]) not in sparse]
        plans = plan_buckets(
            [ParameterSpec.of(names[i], params[i]) for i in dense],
            cap_bytes=cap_bytes,
            first_cap_bytes=first_cap_bytes,
            alignment=alignment,
            lanes=lanes,
        )
        index_of = {name: i for i, name in enumerate(names)}
        self.members = tuple(tuple(index_of[name] for name in plan.names) for plan in plans)
        self.buckets = tuple(
            Bucket(plan, [params[i] for i in members])
            for plan, members in zip(plans, self.members, strict=True)
        )
        self.bucket_of = [-1] * len(names)
        for bucket, members in enumerate(self.members):
            for i in members:
                self.bucket_of[i] = bucket
        self.digest = plan_digest(plans, extra=repr(self.sparse))

    def is_laid_out_as(self, params: Sequence[nn.Parameter]) -> bool:
        """Has each gradient the layout that its parameter has now?

        Raises:
            UsageError: a parameter is expanded now.
        """
        placed = zip(self.buckets, self.members, strict=True)
        slots = [
            (slot, i)
            for bucket, members in placed
            for slot, i in zip(bucket.plan.slots, members, strict=True)
        ]
        return all(ParameterSpec.of(slot.spec.name, params[i]) == slot.spec for slot, i in slots)

    def release_gradients(self, *, has_failed: bool = False) -> None:
        """Give every parameter whose gradient lives in a bucket a gradient of its own.

        Args:
            has_failed: An operation that was aborted may still write the buckets: what they hold is dropped.
        """
        for bucket in self.buckets:
            for param in bucket.params:
                if param.grad is not None and bucket.holds(param.grad):
                    param.grad = None if has_failed else param.grad.clone()
