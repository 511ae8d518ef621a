"""PowerSGD: gradients of matrices are averaged as products of two thin matrices, with error feedback.

For each parameter of two dimensions or more, seen as a matrix M (with the error E of the rounds before)::

    P <- mean over ranks of (M + E) Q;   P <- orthogonal columns of P
    Q <- mean over ranks of (M + E)^T P;   g <- P Q^T;   E <- M + E - g

Q is kept for the next round (warm start). Everything else is averaged as it is. Source: Vogels et al. 2019,
"PowerSGD: practical low-rank gradient compression for distributed optimization", algorithms 1 and 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context
from bagua_rt.algorithms.operations import CODEC_DTYPES, sum_
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class PowerSGD(Algorithm):
    """The mean of the gradients over all ranks, in low rank.

    Args:
        rank: Columns of the thin matrices. A parameter is compressed where that saves bytes.
        hierarchical: Sum within each node first, then among the nodes' leaders.

    Raises:
        UsageError: the rank is out of range.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 2
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise UsageError("rank is not usable", expected="a whole number >= 1", got=repr(self.rank))

    def bind(self, context: Context) -> _State:
        return _State(context, self)


class _Matrix:
    """One parameter as a matrix, with its error and its parts of the bucket's thin matrices."""

    def __init__(self, name: str, view: torch.Tensor, rank: int) -> None:
        self.name = name
        self._view = view
        self.rows = view.shape[0]
        self.columns = view.numel() // self.rows
        self.rank = min(rank, self.rows, self.columns)
        self._dtype = torch.promote_types(view.dtype, torch.float32)
        self.error = torch.zeros(self.rows, self.columns, dtype=self._dtype, device=view.device)
        self.p = self.q = torch.empty(0)

    @staticmethod
    def saves_bytes(view: torch.Tensor, rank: int) -> bool:
        """Is the parameter larger than its thin matrices?"""
        if view.dim() < 2 or not view.numel() or view.dtype not in CODEC_DTYPES:
            return False
        return view.numel() > rank * (view.shape[0] + view.numel() // view.shape[0])

    def first_query(self) -> torch.Tensor:
        """The Q that every rank starts with: random, but the same for one name."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.columns, self.rank, generator=generator, dtype=self._dtype)

    def project(self) -> None:
        """P from the gradient with its error, which `error` holds until `take`."""
        self.error.add_(self._view.reshape(self.rows, self.columns))
        torch.matmul(self.error, self.q, out=self.p)

    def project_back(self) -> None:
        """Q from the orthogonal P."""
        _orthogonalise_(self.p)
        torch.matmul(self.error.t(), self.p, out=self.q)

    def take(self, first_query: torch.Tensor) -> None:
        """The gradient from P and Q. What is not finite stays in the gradient, and in nothing else."""
        product = self.p @ self.q.t()
        self._view.copy_(product.view(self._view.shape))
        torch.nan_to_num(self.error.sub_(product), nan=0.0, posinf=0.0, neginf=0.0, out=self.error)
        self.q.copy_(torch.where(self.q.isfinite().all(), self.q, first_query))

    def reset(self) -> None:
        """As in the beginning."""
        self.error.zero_()
        self.q.copy_(self.first_query())


@torch.no_grad()
def _orthogonalise_(columns: torch.Tensor) -> None:
    """Modified Gram-Schmidt; a column that depends on earlier ones becomes 0. The host waits for nothing."""
    smallest = 8 * columns.shape[0] * torch.finfo(columns.dtype).eps
    for k in range(columns.shape[1]):
        column = columns[:, k]
        bound = column.norm() * smallest
        for j in (*range(k), *range(k)):  # twice: what cancellation leaves is not orthogonal yet
            column.sub_(columns[:, j] * torch.dot(columns[:, j], column))
        norm = column.norm()
        depends = (norm <= bound) & bound.isfinite()
        column.copy_(torch.where(depends, torch.zeros_like(column), column / norm))


class _Thin:
    """One bucket: its matrices, and one buffer each for all P, all Q, and what is not compressed."""

    def __init__(self, bucket: Bucket, rank: int) -> None:
        pairs = list(zip(bucket.plan.names, bucket.views, strict=True))
        self.matrices = [_Matrix(name, view, rank) for name, view in pairs if _Matrix.saves_bytes(view, rank)]
        self._others = [view for _, view in pairs if not _Matrix.saves_bytes(view, rank)]
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        device = bucket.flat.device
        self.p = torch.zeros(sum(m.rows * m.rank for m in self.matrices), dtype=wide, device=device)
        self.q = torch.zeros(sum(m.columns * m.rank for m in self.matrices), dtype=wide, device=device)
        self.others = torch.zeros(
            sum(view.numel() for view in self._others), dtype=bucket.flat.dtype, device=device
        )
        at_p = at_q = 0
        for m in self.matrices:
            m.p = self.p[at_p : at_p + m.rows * m.rank].view(m.rows, m.rank)
            m.q = self.q[at_q : at_q + m.columns * m.rank].view(m.columns, m.rank)
            at_p, at_q = at_p + m.p.numel(), at_q + m.q.numel()
            m.reset()
        self._first_queries = [m.first_query().to(device) for m in self.matrices]

    @torch.no_grad()
    def project(self, scale: float) -> None:
        """Fill all P, and what is not compressed, times `scale`."""
        for m in self.matrices:
            m.project()
        self.p.mul_(scale)
        if self._others:
            torch.cat([view.reshape(-1) for view in self._others], out=self.others)
            self.others.mul_(scale)

    @torch.no_grad()
    def project_back(self, scale: float) -> None:
        """Fill all Q, times `scale`."""
        for m in self.matrices:
            m.project_back()
        self.q.mul_(scale)

    @torch.no_grad()
    def take(self) -> None:
        """Fill the bucket."""
        for m, first in zip(self.matrices, self._first_queries, strict=True):
            m.take(first)
        parts = self.others.split([view.numel() for view in self._others])
        for view, part in zip(self._others, parts, strict=True):
            view.copy_(part.view(view.shape))


class _State(AlgorithmState):
    def __init__(self, context: Context, declaration: PowerSGD) -> None:
        super().__init__(context)
        self._declaration = declaration
        self._thin: dict[int, _Thin] = {}

    @property
    def sparse_scale(self) -> float:
        return 1.0 / self.context.world_size

    def setup(self, buckets: Sequence[Bucket]) -> None:
        is_alone = self.context.world_size == 1
        self._thin = {} if is_alone else {b.index: _Thin(b, self._declaration.rank) for b in buckets}

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        thin, run = self._thin.get(bucket.index), self.context.device.run
        if thin is None:
            return
        # Scaled before they are summed: no sum overflows where its mean doesn't.
        share = 1.0 / comm.world_size
        run(stream, lambda: thin.project(share))
        for flat in (thin.p, thin.others):
            self._sum(flat, stream)
        if thin.matrices:
            run(stream, lambda: thin.project_back(share))
            self._sum(thin.q, stream)
        run(stream, thin.take)

    def _sum(self, flat: torch.Tensor, stream: Stream) -> None:
        if not flat.numel():
            return
        sum_(flat, self.context, stream, hierarchical=self._declaration.hierarchical)

    def _matrices(self) -> list[_Matrix]:
        return [m for thin in self._thin.values() for m in thin.matrices]

    def rollback(self) -> None:
        for matrix in self._matrices():
            matrix.reset()

    def state_dict(self) -> dict[str, Any]:
        return {
            "error": {m.name: m.error.clone() for m in self._matrices()},
            "query": {m.name: m.q.clone() for m in self._matrices()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for m in self._matrices():
            query = state["query"].get(m.name)
            if query is not None and query.shape == m.q.shape:
                m.q.copy_(query)
                m.error.copy_(state["error"][m.name])

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        self.load_state_dict(state)
        for m in self._matrices():
            m.error.zero_()
        return "the errors"
