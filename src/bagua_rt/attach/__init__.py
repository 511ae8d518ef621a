"""Attaching a model: the only place that knows autograd and nn.Module."""

from bagua_rt.attach.attach import attach
from bagua_rt.attach.attached import Attached
from bagua_rt.attach.distributed_data_parallel import DistributedDataParallel

__all__ = ["Attached", "DistributedDataParallel", "attach"]
