"""Where a nursery may not fork, its children are started anew, and are the same to whoever started them."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.emulator import product
from tests.nursery import Nursery
from tests.ranks import rank_environment, run_scripts

PROGRAM = """
import os, sys
args, fd = sys.argv[1:-1], int(sys.argv[-1])
os.write(fd, f"{args} {os.environ['OWN']} {'torch' in sys.modules}".encode())
sys.exit(3)
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="numpy starts no thread on one core")
def test_a_nursery_with_threads_starts_its_children_anew() -> None:
    env = rank_environment({"OPENBLAS_NUM_THREADS": "2", "OWN": "1"})  # numpy starts them when it is imported
    nursery = Nursery(env)
    read, write = os.pipe()
    try:
        with tempfile.TemporaryFile() as output:
            child = nursery.start(PROGRAM, ["a", "b"], env, output.fileno(), output.fileno(), write)
            assert child.wait(60) == 3
            output.seek(0)
            assert output.read() == b""
        assert os.read(read, 1000).decode() == "['a', 'b'] 1 False"
    finally:
        nursery.close()
        os.close(read)
        os.close(write)


def test_a_driver_that_is_initialised_is_noticed() -> None:
    source = """
import ctypes
from tests.nursery import has_met_cuda
said = [has_met_cuda()]
driver = ctypes.CDLL("libcuda.so.1")
said.append(has_met_cuda())
driver.cuInit(0)
said.append(has_met_cuda())
print(*said)
"""
    (result,) = run_scripts([source], env=product.environment(base={}))
    assert result.stdout.split() == ["False", "False", "True"], result.stderr
