"""The emulator's statements about CUDA and NCCL, put to the real libraries: a step each.

What fails here is a fault of the emulator, and of every test that leaned on it.
"""

from __future__ import annotations

import os
from functools import partial

from tests.emulator import conformance
from tools.gpu_check.steps import Bench, Step


def _put(statement: str, check: conformance.Check, bench: Bench) -> None:
    from bagua_rt.backends._nccl_library import find_nccl

    bench.prepare()
    os.environ.setdefault("BAGUA_RT_NCCL", str(find_nccl().path))  # the library that the product takes
    world = bench.share("world", conformance.World)
    result = conformance.put(world, statement, check)
    bench.check(statement, result.held, result.observed)


STEPS = tuple(
    Step(statement, partial(_put, statement, check), deadline_s=15.0)
    for statement, check in conformance.STATEMENTS
)
