"""THE CONTROL LANE: what ranks agree about, on the host, beside the data.

A small gloo group on CPU tensors, in every job, on CUDA too. It carries agreements (`Control.agree`), the
generation ledger (`pack`, `Control.launch_max`, `unpack`), news of failures (`FailureBoard`), who is there
(`RollCall`), what a communicator's ranks call (`CallBoard`), and how long to wait (`Patience`).
"""

from __future__ import annotations

from bagua_rt.control.call_board import CallBoard
from bagua_rt.control.failure_board import FailureBoard
from bagua_rt.control.lane import Control, PendingMax
from bagua_rt.control.ledger import NONE, UNSEEN, LedgerEntry, LedgerResult, Place, pack, unpack
from bagua_rt.control.patience import Patience
from bagua_rt.control.roll_call import RollCall, told
from bagua_rt.control.ticker import Ticker

__all__ = [
    "NONE",
    "UNSEEN",
    "CallBoard",
    "Control",
    "FailureBoard",
    "LedgerEntry",
    "LedgerResult",
    "Patience",
    "PendingMax",
    "Place",
    "RollCall",
    "Ticker",
    "pack",
    "told",
    "unpack",
]
