"""signSGD with majority vote (Bernstein et al. 2019): every rank moves by the sign that most ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua_rt.algorithms import Algorithm, AlgorithmState, Context, register
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket


@register
@dataclass(frozen=True)
class SignSGD(Algorithm):
    """Move by the sign that most ranks have."""

    name: ClassVar[str] = "signsgd"

    def bind(self, context: Context) -> SignSGDState:
        return SignSGDState(context)


class SignSGDState(AlgorithmState):
    """The votes of one attached model."""

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self.votes = {b.index: torch.empty_like(b.flat, dtype=torch.int32) for b in buckets}

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        flat, votes, run = bucket.flat, self.votes[bucket.index], self.context.device.run
        run(stream, lambda: votes.copy_(flat.sign()))
        comm.all_reduce_(votes, "sum", stream=stream)
        run(stream, lambda: flat.copy_(votes.sign()))
