"""Adam (or AdamW) with a warm-up, after which the variance is frozen and only the momentum is communicated.

Source: Tang et al. 2021, "1-bit Adam", algorithm 1. What it has in common with the communication is
algorithms/momentum.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from bagua_rt.errors import UsageError
from bagua_rt.optim.paired import PairedOptimizer


class FrozenVarianceAdam(PairedOptimizer):
    """Adam for `warmup_steps` steps; from then on the variance is frozen, and the momentum the mean.

    Warm-up: torch's own Adam (or AdamW) on the averaged gradients. Then, with g the local gradient::

        m <- mean over ranks of  beta1 * m + (1 - beta1) * g          (compressed)
        x <- x - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^W)) + eps)

    where v and its bias correction stay those of step W, the last of the warm-up. Elements whose v is 0
    then never had a gradient; their momentum stays 0, since it could only be the compression's noise.

    Not attached, it is the same optimizer in a world of one rank, with nothing to compress.

    Args:
        params: Parameters or groups, as any torch optimizer takes them.
        lr: Learning rate.
        betas: Decay of momentum and variance.
        eps: Added to the root of the variance.
        weight_decay: Holds in both stages. As in Adam it is added to the gradient, and so becomes part of
            the momentum; with `decoupled_weight_decay` it shrinks the weights, as in AdamW.
        warmup_steps: W; 15 to 25 % of all steps is usual.
        decoupled_weight_decay: AdamW's weight decay.
        variance_floor: When the variance is frozen, elements below this part of their parameter's mean are
            raised to it. Compression gives an element with a small variance a momentum of its neighbours'
            size, which moves it too far; a floor f bounds that to 1/sqrt(f) of their step. 0 raises nothing.
        settled_ratio: Go on warming up after `warmup_steps` until the variance has settled: until its sum,
            without its bias, and that of 1/(1 - beta2) steps before differ by no more than this ratio. The
            paper has 0.96. It is looked at every 1/(1 - beta2) steps; None doesn't.

    Raises:
        UsageError: a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        decoupled_weight_decay: bool = False,
        variance_floor: float = 0.0,
        settled_ratio: float | None = None,
    ) -> None:
        if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 1:
            raise UsageError(
                "warmup_steps is not usable",
                expected="a whole number >= 1: the variance needs a step to be known",
                got=repr(warmup_steps),
            )
        if settled_ratio is not None and not 0 < settled_ratio < 1:
            raise UsageError(
                "settled_ratio is out of range", expected="> 0 and < 1, or None", got=repr(settled_ratio)
            )
        self.warmup_steps = warmup_steps
        self.settled_ratio = settled_ratio
        self._momentum: Mapping[torch.Tensor, torch.Tensor] | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "variance_floor": variance_floor,
            "completed_steps": 0,
            "variance_is_frozen": False,
            "variance_sum": 0.0,  # when it was last looked at
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see torch.optim.Optimizer.

        Raises:
            UsageError: a setting of the group is out of range.
        """
        settings = {**self.defaults, **param_group}
        beta1, beta2 = settings["betas"]
        ranges = {
            "lr": float(settings["lr"]) >= 0,
            "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
            "eps": settings["eps"] >= 0,
            "weight_decay": settings["weight_decay"] >= 0,
            "variance_floor": 0 <= settings["variance_floor"] <= 1,
        }
        if wrong := [key for key, is_right in ranges.items() if not is_right]:
            raise UsageError(
                f"{wrong[0]} is out of range",
                expected=">= 0, betas below 1, variance_floor at most 1",
                got=repr(settings[wrong[0]]),
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own leaves out what is in no group, and a copy must know its warm-up
        own = {"warmup_steps": self.warmup_steps, "settled_ratio": self.settled_ratio, "_momentum": None}
        return {**super().__getstate__(), **own}

    @property
    def completed_steps(self) -> int:
        """Steps done, over all runs of a checkpoint."""
        return int(self.param_groups[0]["completed_steps"])

    @property
    def variance_is_frozen(self) -> bool:
        """Is the warm-up over?"""
        return bool(self.param_groups[0]["variance_is_frozen"])

    def update(self) -> None:
        """Move the parameters by the present stage's rule."""
        frozen = self.variance_is_frozen
        momentum, self._momentum = self._momentum, None
        for group in self.param_groups:
            if frozen:
                self._update_frozen(group, momentum)
            else:
                self._update_adam(group)
            group["completed_steps"] = group["completed_steps"] + 1
        if not frozen and self._warm_up_ends():
            for group in self.param_groups:
                group["variance_is_frozen"] = True
                if group["variance_floor"]:
                    self._raise_to_floor(group)

    @torch.no_grad()
    def form_momentum(self, params: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """``out[i] = beta1 * m + (1 - beta1) * gradient`` of ``params[i]``; its state stays as it is.

        **Shapes:** ``out[i]`` has the shape of ``params[i]``. **Stream:** runs on the compute stream.
        """
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        for param, target in zip(params, out, strict=True):
            group, state = group_of[param], self._state_of(param)
            beta1 = group["betas"][0]
            torch.mul(state["exp_avg"], beta1, out=target)
            if param.grad is not None:
                target.add_(param.grad, alpha=1 - beta1)
            # Also where other ranks alone have a gradient: the mean must hold the whole decay.
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                target.add_(param, alpha=(1 - beta1) * group["weight_decay"])

    def use_momentum(self, momentum: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Let the next update move these parameters by these momenta, and no others."""
        self._momentum = momentum

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["variance_steps"] = torch.zeros((), dtype=torch.float32, device="cpu")
        return state

    def _update_adam(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        states = [self._state_of(param) for param in params]
        beta1, beta2 = group["betas"]
        adam(
            params,
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            has_complex=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )
        for state in states:
            state["variance_steps"].copy_(state["step"])

    def _warm_up_ends(self) -> bool:
        has_settled = self.settled_ratio is None or self._has_settled(self.settled_ratio)
        return has_settled and self.completed_steps >= self.warmup_steps

    def _has_settled(self, ratio: float) -> bool:
        """Is the variance about what it was 1/(1 - beta2) steps ago? All ranks' are equal, bit for bit."""
        window = max(round(1 / (1 - group["betas"][1])) for group in self.param_groups)
        if self.completed_steps % window:
            return False
        now = 0.0
        for group in self.param_groups:
            beta2 = group["betas"][1]
            for state in (self.state[p] for p in group["params"] if p in self.state):
                total = state["exp_avg_sq"].sum(dtype=torch.float64)
                now += float(total) / (1 - beta2 ** float(state["variance_steps"]))
        before = self.param_groups[0]["variance_sum"]
        for group in self.param_groups:
            group["variance_sum"] = now
        return bool(0 < ratio * max(now, before) <= min(now, before))

    def _raise_to_floor(self, group: dict[str, Any]) -> None:
        """Leave no variance below the floor; 0 stays 0, and is not moved at all."""
        for variance in (self.state[p]["exp_avg_sq"] for p in group["params"] if p in self.state):
            wide = torch.promote_types(variance.dtype, torch.float32)
            mean = variance.sum(dtype=wide) / variance.count_nonzero().clamp(min=1)
            raised = variance.clamp(min=mean * group["variance_floor"])
            variance.copy_(torch.where(variance > 0, raised, variance))

    def _update_frozen(
        self, group: dict[str, Any], momentum: Mapping[torch.Tensor, torch.Tensor] | None
    ) -> None:
        if momentum is None:  # nothing was communicated: the local momentum is the mean
            own = [param for param in group["params"] if param.grad is not None]
            local = [torch.empty_like(param) for param in own]
            self.form_momentum(own, local)
            momentum = dict(zip(own, local, strict=True))
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for param in group["params"]:
            if param not in momentum:
                continue
            state = self._state_of(param)
            variance, mean = state["exp_avg_sq"], state["exp_avg"]
            state["step"] += 1
            if group["decoupled_weight_decay"]:
                param.mul_(1 - lr * group["weight_decay"])
            torch.where(variance > 0, momentum[param], torch.zeros((), dtype=mean.dtype), out=mean)
            correction1 = 1 - beta1 ** float(state["step"])
            correction2 = 1 - beta2 ** float(state["variance_steps"])
            if correction2 > 0:
                denominator = (variance / correction2).sqrt_().add_(group["eps"])
                param.addcdiv_(mean, denominator, value=-lr / correction1)
