"""How ranks find each other: a store, a seat for every rank, and one verdict that all of them read.

Rank 0 serves a TCPStore at MASTER_ADDR:MASTER_PORT, or every rank is a client of a store that is served
already (torchrun's agent, or one that the caller passes).
"""

from __future__ import annotations

from bagua_rt.rendezvous.launch import check_launch, check_numbers, overridden
from bagua_rt.rendezvous.meeting import Rendezvous, forget_after_fork, host_identity, join, process_token
from bagua_rt.rendezvous.store import Pace, StoreClient, lone_store, meet, within
from bagua_rt.rendezvous.topology import Seat, arrange_nodes, within_group

__all__ = [
    "Pace",
    "Rendezvous",
    "Seat",
    "StoreClient",
    "arrange_nodes",
    "check_launch",
    "check_numbers",
    "forget_after_fork",
    "host_identity",
    "join",
    "lone_store",
    "meet",
    "overridden",
    "process_token",
    "within",
    "within_group",
]
