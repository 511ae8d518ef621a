"""bagua_rt: a micro-runtime that PyTorch trainers embed to train data-parallel."""

from bagua_rt import algorithms, errors, optim
from bagua_rt.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    FourBit,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
)
from bagua_rt.attach import Attached, DistributedDataParallel, attach
from bagua_rt.process_group import ProcessGroup, default_group, init, shutdown

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "Attached",
    "ByteGrad",
    "Decentralized",
    "DistributedDataParallel",
    "FourBit",
    "GradientAllReduce",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "PowerSGD",
    "ProcessGroup",
    "algorithms",
    "attach",
    "default_group",
    "errors",
    "init",
    "optim",
    "shutdown",
]
