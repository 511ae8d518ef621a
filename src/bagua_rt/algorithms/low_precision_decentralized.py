"""LowPrecisionDecentralized: ranks in a ring send their neighbours what changed, at one byte an element.

Each rank keeps W, the weights that its neighbours know of it, and replicas L and R of its left and right
neighbour's W. After the step, with x the local weights::

    q = C( (x - W) + (L - W)/3 + (R - W)/3 )          C, D: the codec MinMaxUInt8
    L <- L + D(q_L);   R <- R + D(q_R);   x, W <- W + D(q)

so W stays bit for bit what the neighbours' replicas are. Source: Tang et al. 2018, "Communication compression
for decentralized training", DCD-PSGD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.operations import (
    CODEC_DTYPES,
    hierarchical_,
    load_by_name,
    refuse_unknown_steps,
    save_by_name,
    sum_,
    views_in,
)
from bagua_rt.backend import Communicator, Device, Kernels, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class LowPrecisionDecentralized(Algorithm):
    """Mix the weights with both neighbours in a ring, by compressed differences.

    Args:
        interval: Communicate after every `interval`-th generation.
        hierarchical: Average within each node; the nodes' leaders are the ring. A node counts by its size.

    Raises:
        UsageError: the interval is out of range.
    """

    name: ClassVar[str] = "low_precision_decentralized"
    interval: int = 1
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.interval, int) or isinstance(self.interval, bool) or self.interval < 1:
            raise UsageError(
                "interval is not usable", expected="a whole number >= 1", got=repr(self.interval)
            )

    def bind(self, context: Context) -> _State:
        return _State(context, self)


class _Ring:
    """One bucket's place in the ring.

    Args:
        flat: The bucket's buffer.
        numel: Its elements that are not padding.
        comm: The ring.
        sizes: How many ranks each member of the ring stands for.
        kernels: The codec.
    """

    def __init__(
        self, flat: torch.Tensor, numel: int, comm: Communicator, sizes: Sequence[int], kernels: Kernels
    ) -> None:
        n, rank = comm.world_size, comm.rank
        self._numel = numel
        self._left_rank, self._right_rank = (rank - 1) % n, (rank + 1) % n
        # min() makes the mixing symmetric in (rank, neighbour), so that the mean over *ranks* is kept.
        of_left = min(1.0, sizes[self._left_rank] / sizes[rank]) / 3
        self._shares = of_left, min(1.0, sizes[self._right_rank] / sizes[rank]) / 3
        self.agreed = torch.zeros_like(flat)
        self.left = torch.zeros_like(flat)
        self.right = self.left if n == 2 else torch.zeros_like(flat)
        self._wires = torch.zeros(
            3, kernels.minmax_row_bytes(flat.numel(), flat.dtype), dtype=torch.uint8, device=flat.device
        )
        self._decoded = torch.zeros(3, flat.numel(), dtype=flat.dtype, device=flat.device)

    def synchronise(self, comm: Communicator, stream: Stream) -> None:
        """Get the neighbours' weights as they are, uncompressed. **Stream:** queued on `stream`."""
        comm.send_recv(self.agreed, self._right_rank, self.left, self._left_rank, stream=stream)
        if self.right is not self.left:
            comm.send_recv(self.agreed, self._left_rank, self.right, self._right_rank, stream=stream)

    def turn(
        self, flat: torch.Tensor, comm: Communicator, kernels: Kernels, device: Device, stream: Stream
    ) -> None:
        """Replace `flat`, the local weights, by the mixed ones. **Stream:** queued on `stream`."""
        mine, left, right = self._wires
        kernels.ring_difference(flat, self.left, self.right, self.agreed, self._shares, stream)
        kernels.minmax_encode(flat.unsqueeze(0), self._numel, 0, mine.unsqueeze(0), stream)
        comm.send_recv(mine, self._right_rank, left, self._left_rank, stream=stream)
        if self.right is not self.left:
            comm.send_recv(mine, self._left_rank, right, self._right_rank, stream=stream)
            kernels.minmax_decode(self._wires, self._decoded, stream)
        else:
            kernels.minmax_decode(self._wires[:2], self._decoded[:2], stream)
        device.run(stream, lambda: self._add_differences_(flat))

    @torch.no_grad()
    def _add_differences_(self, x: torch.Tensor) -> None:
        mine, left, right = self._decoded
        self.agreed.add_(mine)
        self.left.add_(left)
        if self.right is not self.left:
            self.right.add_(right)
        x.copy_(self.agreed)


def _is_coded(bucket: Bucket) -> bool:
    """Does it go round the ring? What the codec can't carry is averaged over all ranks."""
    return bool(bucket.plan.numel) and bucket.plan.dtype in CODEC_DTYPES


class _State(AlgorithmState):
    source = "weight"
    launch_on = LaunchOn.STEP_POST
    bit_equal = False

    def __init__(self, context: Context, declaration: LowPrecisionDecentralized) -> None:
        super().__init__(context)
        self._declaration = declaration
        self._buckets: tuple[Bucket, ...] = ()
        self._rings: dict[int, _Ring] = {}
        self._is_synchronised = False
        if declaration.hierarchical and (node := context.communicators.intra_node) is not None:
            self.scale = 1.0 / node.world_size

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        refuse_unknown_steps(self._declaration.name, buckets, self.context)
        communicators, kernels = self.context.communicators, self.context.kernels
        ring, sizes = communicators.inter_node, communicators.node_sizes
        if not self._declaration.hierarchical:
            ring, sizes = communicators.world, (1,) * self.context.world_size
        self._rings = {
            b.index: _Ring(b.flat, b.plan.numel, ring, sizes, kernels)
            for b in buckets
            if ring is not None and ring.world_size > 1 and _is_coded(b)
        }
        self._is_synchronised = False

    def begin_generation(self, generation: int) -> bool:
        if self.context.world_size == 1 or (generation + 1) % self._declaration.interval:
            return False
        if not self._is_synchronised:
            compute = self.context.device.compute_stream()
            for bucket in (b for b in self._buckets if b.index in self._rings):
                weights = [param.detach() for param in bucket.params]
                agreed = views_in(self._rings[bucket.index].agreed, bucket)
                self.context.kernels.copy_in(weights, agreed, 1.0, compute)
        return True

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        if not _is_coded(bucket):
            self._average(bucket, stream)
        elif self._declaration.hierarchical:
            hierarchical_(
                bucket.flat,
                self.context.communicators,
                stream,
                lambda leaders: self._turn(bucket, leaders, stream),
            )
        else:
            self._turn(bucket, comm, stream)

    def _turn(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        ring = self._rings[bucket.index]
        if not self._is_synchronised:
            ring.synchronise(comm, stream)
        ring.turn(bucket.flat, comm, self.context.kernels, self.context.device, stream)

    def _average(self, bucket: Bucket, stream: Stream) -> None:
        """Take the mean over all ranks, of what was staged for a mean over the node."""
        share = 1.0 / self.context.world_size / self.scale
        self.context.device.run(stream, lambda: bucket.flat.mul_(share))
        sum_(bucket.flat, self.context, stream, hierarchical=self._declaration.hierarchical)

    def commit(self) -> None:
        self._is_synchronised = True
        compute = self.context.device.compute_stream()
        for bucket in self._buckets:
            weights = [param.detach() for param in bucket.params]
            self.context.kernels.copy_out(bucket.views, weights, compute)

    def state_dict(self) -> dict[str, Any]:
        def saved(part: str) -> dict[str, torch.Tensor]:
            flats = {index: getattr(ring, part) for index, ring in self._rings.items()}
            return save_by_name(self._buckets, flats)

        return {
            "is_synchronised": self._is_synchronised,
            **{part: saved(part) for part in ("agreed", "left", "right")},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = {name for b in self._buckets if b.index in self._rings for name in b.plan.names}
        # Of a parameter that was frozen until now nothing is known: then all replicas are made anew.
        self._is_synchronised = bool(state["is_synchronised"]) and names <= set(state["agreed"])
        for part in ("agreed", "left", "right"):
            flats = {index: getattr(ring, part) for index, ring in self._rings.items()}
            load_by_name(state[part], self._buckets, flats)

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        self._is_synchronised = False
        return "the replicas of the neighbours, in the next round"
