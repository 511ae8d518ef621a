"""THE CONTROL LANE: what ranks agree about, on the host, beside the data.

A small gloo group on CPU tensors, in every job, on CUDA too. It carries agreements (`Control.agree`), the
generation ledger (`pack`, `Control.launch_max`, `unpack`) and news of failures (`FailureBoard`).
"""

from __future__ import annotations

from bagua_rt.control.failure_board import FailureBoard
from bagua_rt.control.lane import Control, PendingMax
from bagua_rt.control.ledger import LedgerEntry, LedgerResult, pack, unpack

__all__ = ["Control", "FailureBoard", "LedgerEntry", "LedgerResult", "PendingMax", "pack", "unpack"]
