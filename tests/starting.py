"""What the tests of init() share: starting as one rank of a job that a launcher placed at a port."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from bagua_rt import process_group
from bagua_rt.errors import BaguaError


@contextlib.contextmanager
def environment(**variables: Any) -> Iterator[None]:
    """The variables of a launcher, and no others', for a while."""
    before = dict(os.environ)
    for name in list(os.environ):
        if re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|SLURM|OMPI|PMIX|BAGUA_RT", name):
            del os.environ[name]
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(
    port: int, rank: int, world_size: int, *, job: str = "", search_s: float = 40.0, **arguments: Any
) -> Any:
    """Start as one rank of a job that a launcher placed at `port`."""
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if job:
        variables["TORCHELASTIC_RUN_ID"] = job
    with environment(**variables, BAGUA_RT_RENDEZVOUS_TIMEOUT_S=search_s):
        return process_group.init("cpu", **{"timeout_s": 40.0, **arguments})


def total(communicator: Any, value: float) -> float:
    tensor = torch.full((3,), value)
    communicator.all_reduce_(tensor, "sum").wait()
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def attempt(port: int, rank: int, world_size: int, **arguments: Any) -> tuple[str, str, float]:
    """Start; the error's type and text ("" where there was none), and how long it took."""
    begin = time.monotonic()
    try:
        with start(port, rank, world_size, **arguments):
            return "", "", time.monotonic() - begin
    except BaguaError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
