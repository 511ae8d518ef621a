"""Groups of ranks: `init`, `shutdown`, who is where, and the communicators of a group."""

from bagua_rt.process_group.group import Communicators, ProcessGroup
from bagua_rt.process_group.start import default_group, init, shutdown, torch_has_a_group

__all__ = ["Communicators", "ProcessGroup", "default_group", "init", "shutdown", "torch_has_a_group"]
