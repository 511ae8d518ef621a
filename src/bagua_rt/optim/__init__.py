"""Optimizers that bring their communication along."""

from bagua_rt.optim.onebit_adam import OneBitAdam
from bagua_rt.optim.paired import PairedOptimizer

__all__ = ["OneBitAdam", "PairedOptimizer"]
