"""What must come out: all ranks in one process, by the algorithms' definitions and not by the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import nn

import bagua_rt as bagua
from tools.soak.model import Net, batches, has_inf, loss_of
from tools.soak.plan import BY_WEIGHT, Plan

INTERVAL = 3  # of local_sgd
LR = 0.02
# (relative, absolute) in one step, whose weights are then taken over: what orders of additions may differ in
_TOLERANCES = {torch.float64: (1e-8, 1e-9), torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 2e-2)}


def make_optimizer(name: str, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer by its name in a plan. Epsilons are large: a tiny gradient's sign must not decide."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=LR)
    if name == "momentum":
        return torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.01)
    if name == "adam":
        return torch.optim.Adam(params, lr=LR, eps=0.1)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=LR, eps=0.1, weight_decay=0.1)
    return bagua.optim.OneBitAdam(params, LR, eps=0.1, warmup_steps=1_000_000)


def clip(params: Sequence[nn.Parameter]) -> None:
    """As the trainer does."""
    nn.utils.clip_grad_norm_([p for p in params if p.grad is not None], 0.5, foreach=False)


class Reference:
    """All ranks' replicas, trained in this process.

    Args:
        plan: The episode.

    Attributes:
        replicas: One for each rank, or a single one where all are equal.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world_size = plan.world_size
        torch.manual_seed(plan.seed)
        first = Net(plan)
        self.replicas = [first]
        self._optimizers = [make_optimizer(plan.optimizer, list(first.parameters()))]
        self._largest_gradient = 0.0
        self.generation = self.round = 0  # counted from the attach on, and from the algorithm's own beginning
        if not plan.keeps_ranks_equal:
            self.all_from(first, self._optimizers[0], plan.world_size)

    def all_from(self, model: Net, optimizer: torch.optim.Optimizer, world_size: int) -> None:
        """All ranks have been made equal to this one, by an attach or a fault."""
        self.world_size = world_size
        self.generation = self.round = 0
        count = 1 if self.plan.keeps_ranks_equal else world_size
        state, optimizer_state = model.state_dict(), optimizer.state_dict()
        flags = [p.requires_grad for p in model.parameters()]
        self.replicas = [Net(self.plan) for _ in range(count)]
        self._optimizers = []
        for replica in self.replicas:
            replica.load_state_dict(state)
            for param, flag in zip(replica.parameters(), flags, strict=True):
                param.requires_grad_(flag)
            self._optimizers.append(make_optimizer(self.plan.optimizer, list(replica.parameters())))
            self._optimizers[-1].load_state_dict(deepcopy(optimizer_state))  # else they would share tensors

    def all_from_first(self, world_size: int) -> None:
        """All ranks have been made equal to rank 0."""
        self.all_from(self.replicas[0], self._optimizers[0], world_size)

    def replica(self, rank: int) -> Net:
        """The replica of a rank."""
        return self.replicas[rank % len(self.replicas)]

    def toggle(self, block: int) -> None:
        """Freeze a block on all ranks, or unfreeze it."""
        for replica in self.replicas:
            toggle(replica, block)

    def step(
        self, step: int, algorithm: str, life: int, ranks: Sequence[int], *, is_cleared: bool = False
    ) -> None:
        """Do one step of all ranks.

        Args:
            step: Which.
            algorithm: What is in force.
            life: How many faults there were.
            ranks: Those that have data.
            is_cleared: Gradients were set to None before, after an exception in backward.
        """
        if is_cleared:
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
        before = [[p.grad for p in replica.parameters()] for replica in self.replicas]
        averages = self._weights(algorithm) if algorithm in ("decentralized", "shift_one") else None
        local = [self._gradients(step, rank, life) for rank in ranks]
        if algorithm in BY_WEIGHT:
            for rank, grads in zip(ranks, local, strict=True):
                self._assign(rank, grads, before)
        else:
            divisor = self._divisor(algorithm, len(ranks))
            total = [_sum([grads[i] for grads in local], divisor) for i in range(len(before[0]))]
            for rank in range(len(self.replicas)):
                self._assign(rank, total, before)
        if averages is not None:
            self._take(averages)
        skips = has_inf(self.plan, step, life) in ranks
        for replica, optimizer in zip(self.replicas, self._optimizers, strict=True):
            if self.plan.clips:
                clip(list(replica.parameters()))
            if not skips:
                optimizer.step()
            optimizer.zero_grad(set_to_none=self.plan.sets_to_none)
        self.generation += 1
        self.round += 1
        if algorithm == "local_sgd" and self.generation % INTERVAL == 0:
            self._take(self._weights("decentralized"))

    def _divisor(self, algorithm: str, active: int) -> float:
        if algorithm == "sum":
            # join(divide_by_initial=False) multiplies by world_size / active, whatever is summed
            return 1.0 if self.plan.divides_by_initial or not self.plan.joins else active / self.world_size
        return self.world_size if self.plan.divides_by_initial or not self.plan.joins else active

    def _gradients(self, step: int, rank: int, life: int) -> list[torch.Tensor | None]:
        replica = self.replica(rank)
        for param in replica.parameters():
            param.grad = None
        for batch in batches(self.plan, step, rank, life):
            loss_of(replica(batch.x, batch.used), batch).backward()
        grads = [p.grad for p in replica.parameters()]
        for grad in grads:
            if grad is not None and grad.numel():
                values = grad._values() if grad.is_sparse else grad
                self._largest_gradient = max(self._largest_gradient, values.abs().max().item())
        return grads

    def _assign(
        self, rank: int, grads: Sequence[torch.Tensor | None], before: Sequence[Sequence[torch.Tensor | None]]
    ) -> None:
        """A parameter that nobody used keeps what zeroing has left."""
        kept = before[rank % len(before)]
        for param, grad, old in zip(self.replica(rank).parameters(), grads, kept, strict=True):
            param.grad = old if grad is None else grad.clone()  # else replicas would clear each other's

    def _weights(self, algorithm: str) -> list[list[torch.Tensor]]:
        """For each rank what the weights become by averaging, all with all or in pairs."""
        n = self.world_size
        every = [[p.detach().clone() for p in replica.parameters()] for replica in self.replicas]
        if len(every) == 1:
            every *= n
        if algorithm == "decentralized":
            groups = [list(range(n))] * n
        else:
            groups = [sorted({rank, self._peer(rank)}) for rank in range(n)]
        return [
            [torch.stack([every[rank][i] for rank in group]).mean(0) for i in range(len(every[0]))]
            for group in groups
        ]

    def _peer(self, rank: int) -> int:
        n, turn = self.world_size, self.round
        if n == 1:
            return 0
        if n % 2:  # a round-robin tournament: ranks whose sum is the round's number meet
            return (turn - rank) % n
        half = n // 2
        return (rank + turn) % half + half if rank < half else (rank - half - turn) % half

    def _take(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        with torch.no_grad():
            for replica, mine in zip(self.replicas, weights, strict=False):
                for param, value in zip(replica.parameters(), mine, strict=True):
                    if param.requires_grad:  # a frozen one takes no part
                        param.copy_(value)

    def compare(self, model: Net, rank: int, algorithm: str) -> None:
        """Raise if `model` is not what must have come out; then go on from exactly what it is.

        Raises:
            AssertionError: names the parameter and the difference.
        """
        coarse = LR * 0.03 * self._largest_gradient if algorithm == "bytegrad" else 0.0
        with torch.no_grad():
            for (name, mine), right in zip(
                model.named_parameters(), self.replica(rank).parameters(), strict=True
            ):
                relative, absolute = _TOLERANCES[mine.dtype]
                error = (mine - right).abs() - relative * right.abs()
                if mine.numel() and not error.max().item() <= absolute + coarse:
                    worst = error.max().item()
                    raise AssertionError(f"{name} ({mine.dtype}) is off by {worst:.3g}: {mine} for {right}")
                if not all(math.isfinite(v) for v in mine.flatten().tolist()):
                    raise AssertionError(f"{name} is not finite")
                right.copy_(mine)


def _sum(grads: Sequence[torch.Tensor | None], divisor: float) -> torch.Tensor | None:
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    if present[0].is_sparse:
        return (sum(present[1:], present[0]) / divisor).coalesce()
    wide = torch.promote_types(present[0].dtype, torch.float32)
    return (torch.stack([grad.to(wide) for grad in present]).sum(0) / divisor).to(present[0].dtype)


def toggle(model: Net, block: int) -> None:
    """Freeze a block, or unfreeze it; one that stays alone is left as it is."""
    for param in model.blocks[block % len(model.blocks)].parameters():
        param.requires_grad_(not param.requires_grad)
        if not param.requires_grad:
            param.grad = None
