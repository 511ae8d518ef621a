"""Optimizers that bring their communication along."""

from bagua_rt.optim.frozen_variance import FrozenVarianceAdam
from bagua_rt.optim.onebit_adam import OneBitAdam
from bagua_rt.optim.paired import PairedOptimizer
from bagua_rt.optim.qadam import QAdam

__all__ = ["FrozenVarianceAdam", "OneBitAdam", "PairedOptimizer", "QAdam"]
