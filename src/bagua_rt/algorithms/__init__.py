"""Communication algorithms, and the contract for writing one (base.py)."""

from bagua_rt.algorithms.async_model_average import AsyncModelAverage
from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.bytegrad import ByteGrad
from bagua_rt.algorithms.decentralized import Decentralized
from bagua_rt.algorithms.fourbit import FourBit
from bagua_rt.algorithms.gradient_allreduce import GradientAllReduce
from bagua_rt.algorithms.local_sgd import LocalSGD
from bagua_rt.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua_rt.algorithms.onebit_adam import OneBitAdamAlgorithm
from bagua_rt.algorithms.powersgd import PowerSGD
from bagua_rt.algorithms.qadam import QAdamAlgorithm
from bagua_rt.algorithms.registry import create, names, register

__all__ = [
    "Algorithm",
    "AlgorithmState",
    "AsyncModelAverage",
    "ByteGrad",
    "Context",
    "Decentralized",
    "FourBit",
    "GradientAllReduce",
    "LaunchOn",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "OneBitAdamAlgorithm",
    "PowerSGD",
    "QAdamAlgorithm",
    "create",
    "names",
    "register",
]
