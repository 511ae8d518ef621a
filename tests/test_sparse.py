"""Sparse gradients of embeddings: added up, beside buckets, and where they are not what was promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import One, backward, caught, grad, group, on, wrap
from tests.ranks import RankContext, RankPool

SIZES = (2, 3)


def lookup(ctx: RankContext, find_unused: bool) -> dict[str, Any]:
    with group(ctx):
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap("attach", model, optimizer, find_unused_parameters=find_unused)
        before = model.weight.detach().clone()
        unused = find_unused and ctx.rank == ctx.world_size - 1
        rows = torch.tensor([] if unused else [0, ctx.rank + 1], dtype=torch.int64)
        wrapped.forward(rows).sum().backward()
        assert model.weight.grad is not None
        dense = model.weight.grad.to_dense()
        optimizer.step()
        return {
            "sparse": model.weight.grad.is_sparse,
            "grad": dense[:, 0].tolist(),
            "before": before,
            "weight": model.weight.detach(),
        }


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("world_size", SIZES)
def test_sparse_gradients_are_added_up(pool: RankPool, world_size: int, find_unused: bool) -> None:
    results = on(pool, world_size, lookup, find_unused)
    users = world_size - 1 if find_unused else world_size
    expected = [users / world_size] + [1 / world_size if row <= users else 0.0 for row in range(1, 5)]
    for result in results:
        assert result["sparse"]
        assert result["grad"] == pytest.approx(expected, rel=1e-6)
        assert torch.equal(result["weight"], results[0]["weight"])
        moved = (result["before"] - result["weight"])[:, 0]
        torch.testing.assert_close(moved, 0.1 * torch.tensor(expected), rtol=1e-4, atol=1e-6)


class Lookup(nn.Module):
    """A sparse embedding between dense layers: its rows and the others' buckets share a lane."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = One(), One()
        self.rows = nn.Embedding(3, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.rows(x.long().flatten() % 3) + self.first(x))
        return out


def raising_with_another_plan(ctx: RankContext) -> dict[str, Any]:
    """A parameter is frozen on all ranks, and in the same step one rank's backward raises."""
    with group(ctx, timeout_s=20.0, lanes=1):
        model = Lookup()
        nn.init.ones_(model.rows.weight)
        wrapped = wrap("attach", model, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
        fails = False

        def fail(_: torch.Tensor) -> None:
            if fails and ctx.rank == 1:
                raise KeyError("mine")

        backward(wrapped, ctx)
        model.last.a.weight.register_post_accumulate_grad_hook(fail)
        errors = []
        for flag in (False, True):
            model.first.a.weight.requires_grad_(flag)
            model.zero_grad()
            fails = True
            errors.append(caught(lambda: backward(wrapped, ctx))[0])
            fails = False
            model.zero_grad()
            backward(wrapped, ctx)
        rows = model.rows.weight.grad
        return {
            "errors": errors,
            "grads": [grad(model.first.a.weight), grad(model.last.a.weight)],
            "rows": [] if rows is None else rows.to_dense().flatten().tolist(),
        }


def test_sparse_rows_and_buckets_keep_one_order_when_a_backward_raises(pool: RankPool) -> None:
    for rank, found in enumerate(on(pool, 2, raising_with_another_plan)):
        assert found["errors"] == ["KeyError" if rank == 1 else "PeerError"] * 2
        assert found["grads"] == [1.5, 2.5]
        assert found["rows"] == [0.0, 0.5, 0.5]


def dense_where_sparse_was_promised(ctx: RankContext) -> tuple[str, str]:
    with group(ctx):
        model = nn.Embedding(4, 2, sparse=True)
        wrapped = wrap("attach", model)
        return caught((wrapped.forward(torch.tensor([1])).sum() + model.weight.sum()).backward)


def test_a_dense_gradient_of_a_sparse_embedding_is_refused(pool: RankPool) -> None:
    for kind, text in on(pool, 2, dense_where_sparse_was_promised):
        assert kind == "UsageError"
        assert "'weight' is not what its embedding promised" in text


def sparse_join(ctx: RankContext) -> list[float]:
    with group(ctx):
        model = nn.Embedding(3, 1, sparse=True)
        wrapped, found = wrap("attach", model), []
        with wrapped.run.join(divide_by_initial=False):
            for _ in range(2 - ctx.rank):
                model.zero_grad()
                wrapped.forward(torch.tensor([1])).sum().backward()
                assert model.weight.grad is not None
                found.append(model.weight.grad.to_dense()[1].item())
        return found


def test_join_divides_sparse_gradients_by_those_that_are_left_too(pool: RankPool) -> None:
    assert on(pool, 2, sparse_join) == [[1.0, 1.0], [1.0]]


def averaged_weights(ctx: RankContext, algorithm: str) -> tuple[float, bool]:
    options = {"interval": 1} if algorithm == "local_sgd" else {}
    with group(ctx):
        model = nn.Embedding(3, 2, sparse=True)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = bagua.attach(model, optimizer, bagua.algorithms.create(algorithm, **options))
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.tensor([1])).sum() * (ctx.rank + 1.0)).backward()
            optimizer.step()
        run.close()
        assert model.weight.grad is not None
        return model.weight[1, 0].item(), model.weight.grad.is_sparse


@pytest.mark.parametrize(
    ("algorithm", "weights"), [("local_sgd", [0.7, 0.7]), ("decentralized", [0.75, 0.65])]
)
def test_sparse_gradients_stay_with_their_rank_where_weights_are_averaged(
    pool: RankPool, algorithm: str, weights: list[float]
) -> None:
    results = on(pool, 2, averaged_weights, algorithm)
    assert [weight for weight, _ in results] == pytest.approx(weights)
    assert all(is_sparse for _, is_sparse in results)
