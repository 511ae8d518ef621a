"""Parameters, buffers and optimizer state made equal, bit for bit, to the root rank's."""

from bagua_rt.replicate.optimizers import replicate_optimizers
from bagua_rt.replicate.tensors import TensorReplicator, kind_without_bytes, replicate_tensors

__all__ = ["TensorReplicator", "kind_without_bytes", "replicate_optimizers", "replicate_tensors"]
