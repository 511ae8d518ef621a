"""Steps that go wrong in every way, for test_gpu_check.py: none may stop the others."""

from __future__ import annotations

import os
import signal
import threading

from tools.gpu_check.steps import Bench, Step


def good(bench: Bench) -> None:
    bench.check("good", True, f"process {os.getpid()}", pid=os.getpid())


def wrong(bench: Bench) -> None:
    bench.check("wrong", False, "on purpose")


def raises(bench: Bench) -> None:
    bench.check("before it raises", True)
    raise KeyError("planted")


def crashes(bench: Bench) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(bench: Bench) -> None:
    threading.Event().wait()


def one_rank_crashes(bench: Bench) -> None:
    if bench.rank == 1:
        crashes(bench)
    bench.check("the other rank", True)


def measured(bench: Bench) -> None:
    bench.figure("measured", "1 us", us=1.0)


STEPS = (
    *(Step("good", good), Step("wrong", wrong), Step("good again", good)),
    *(Step("raises", raises), Step("crashes", crashes), Step("hangs", hangs, deadline_s=1.0)),
    *(Step("good at last", good), Step("two ranks", one_rank_crashes, ranks=2), Step("figure", measured)),
)
