"""Decentralized: weights are averaged with peers; gradients stay each rank's own.

    x_{t+1} = avg(x_t) - lr * g(x_t)

The average of the weights travels beside forward and backward, and replaces the weights just before the
optimizer steps. Source: Lian et al. 2017, "Can decentralized algorithms outperform centralized
algorithms?"; the pairing is that of BAGUA's shift_one, extended to odd worlds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.operations import (
    hierarchical_,
    load_by_name,
    refuse_unknown_steps,
    save_by_name,
    sum_,
)
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Average the weights with all ranks, or with one peer after the other.

    Args:
        peers: "all": the mean over all ranks. "shift_one": the mean with one peer, another one each round;
            on an odd world one rank has no peer in a round, by a fixed schedule.
        interval: Communicate in every `interval`-th generation.
        hierarchical: Average within each node first; then the nodes' leaders are the peers, and a node
            counts by its size.
    """

    name: ClassVar[str] = "decentralized"
    peers: Literal["all", "shift_one"] = "all"
    interval: int = 1
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.peers not in ("all", "shift_one"):
            raise UsageError("unknown peers", expected="'all' or 'shift_one'", got=repr(self.peers))
        if not isinstance(self.interval, int) or self.interval < 1:
            raise UsageError(
                "interval is not usable", expected="a whole number >= 1", got=repr(self.interval)
            )

    def bind(self, context: Context) -> _State:
        return _State(context, self)


def shift_one_peer(rank: int, world_size: int, round_: int) -> int | None:
    """The peer of `rank` in a round, or None where it has none.

    Even worlds: the two halves are paired, shifted by one each round (period ``world_size / 2``). Odd
    worlds: the round-robin tournament's schedule, in which the rank that sits out changes each round
    (period ``world_size``).
    """
    if world_size == 1:
        return None
    if world_size % 2:
        peer = (round_ - rank) % world_size
        return None if peer == rank else peer
    half = world_size // 2
    return (round_ + rank) % half + half if rank < half else (rank - half - round_) % half


class _State(AlgorithmState):
    source = "weight"
    launch_on = LaunchOn.FORWARD
    bit_equal = False

    def __init__(self, context: Context, declaration: Decentralized) -> None:
        super().__init__(context)
        self._declaration = declaration
        self._all = declaration.peers == "all"
        self._buckets: tuple[Bucket, ...] = ()
        self._received: dict[int, torch.Tensor] = {}
        self._round = 0
        self._average_is_due = False
        node = context.communicators.intra_node if declaration.hierarchical else None
        if self._all:
            self.scale = 1.0 / context.world_size
        elif node is not None:
            self.scale = 1.0 / node.world_size

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        refuse_unknown_steps(self._declaration.name, buckets, self.context)
        self._received = {} if self._all else {b.index: torch.empty_like(b.flat) for b in self._buckets}

    def begin_generation(self, generation: int) -> bool:
        self._take_average()  # of the generation before, had it no step (a GradScaler's skip)
        return generation % self._declaration.interval == 0

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        communicators = self.context.communicators
        if self._all:
            sum_(bucket.flat, self.context, stream, hierarchical=self._declaration.hierarchical)
        elif not self._declaration.hierarchical:
            self._meet(bucket, comm, (1,) * comm.world_size, stream)
        else:
            sizes = communicators.node_sizes
            hierarchical_(
                bucket.flat, communicators, stream, lambda leaders: self._meet(bucket, leaders, sizes, stream)
            )

    def _meet(self, bucket: Bucket, comm: Communicator, sizes: Sequence[int], stream: Stream) -> None:
        """Take the mean with the peer of this round; rank r of `comm` stands for ``sizes[r]`` ranks."""
        peer = shift_one_peer(comm.rank, comm.world_size, self._round)
        if peer is None:
            return
        theirs = self._received[bucket.index]
        comm.send_recv(bucket.flat, peer, theirs, peer, stream=stream)
        share = sizes[comm.rank] / (sizes[comm.rank] + sizes[peer])
        self.context.device.run(stream, lambda: _average_(bucket.flat, theirs, share))

    def commit(self) -> None:
        self._average_is_due = True
        self._round += 1

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._take_average()

    def state_dict(self) -> dict[str, Any]:
        due = self._flats() if self._average_is_due else {}
        return {"round": self._round, "average": save_by_name(self._buckets, due)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round = int(state["round"])
        self._average_is_due = bool(state["average"])
        if self._average_is_due:
            compute = self.context.device.compute_stream()
            for bucket in self._buckets:  # of a parameter that was frozen until now there is no average
                weights = [param.detach() for param in bucket.params]
                self.context.kernels.copy_in(weights, bucket.views, 1.0, compute)
            load_by_name(state["average"], self._buckets, self._flats())

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        self._round = int(state["round"])
        return "an average that no step has taken" if state["average"] else ""

    def _flats(self) -> dict[int, torch.Tensor]:
        return {bucket.index: bucket.flat for bucket in self._buckets}

    def _take_average(self) -> None:
        if not self._average_is_due:
            return
        self._average_is_due = False
        for bucket in self._buckets:
            weights = [param.detach() for param in bucket.params]
            self.context.kernels.copy_out(bucket.views, weights, self.context.device.compute_stream())


def _average_(mine: torch.Tensor, theirs: torch.Tensor, share: float) -> None:
    mine.mul_(share).add_(theirs, alpha=1.0 - share)
