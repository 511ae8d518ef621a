"""torch, as the CUDA backend meets it in an emulated run: CPU tensors and an emulated compute stream.

A torch operation is run by the stream's thread, in its place in the stream, and what it reads and writes is
declared to the race check. An operation in place is queued. For any other, the thread that calls it waits
until it has run (the host learns the shape), which the race check does not take for a synchronisation.

torch's CUDA allocator gives memory that was freed on a stream to that stream alone; the CPU's gives it to
anyone. So what is allocated on a lane starts without a history, and is not given to another stream later.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import emulator

Range = tuple[int, int]
STUCK_S = 60.0
HOSTS_FILES = (
    "/bagua_rt/process_group/group.py",
    "/bagua_rt/rendezvous/meeting.py",
    "/bagua_rt/replicate/structure.py",
)


class StreamOperations(TorchDispatchMode):
    """Runs this thread's torch operations on an emulated stream.

    Args:
        handle: The stream.
        label: What reports call the operations, beside their names.
        own_pool: Keeps what they allocate, if its memory must not go to another stream.
    """

    def __init__(self, handle: int, label: str, own_pool: list[torch.Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle, self.label, self._own_pool = handle, label, own_pool
        self.count = 0
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if self._thread != threading.get_ident():  # gloo's threads take the mode over from who calls gloo
            return func(*args, **kwargs)
        touches_nothing = (
            func.is_view or "empty" in name or name in _METADATA or name.startswith("profiler::")
        )
        if touches_nothing or _is_hosts():
            result = func(*args, **kwargs)
            if "empty" in name and self._own_pool is not None:
                keep_apart(_tensors(result), self._own_pool)
            return result
        reads, writes = _accesses(func, args, kwargs)
        self.count += 1
        label = f"{self.label}: {func.name()}"
        if all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns):
            written = _written(func, args, kwargs)
            emulator.run_on_stream(
                self.handle, lambda: _below_autograd(lambda: func(*args, **kwargs)), reads, writes, label
            )
            returned = tuple(written[: len(func._schema.returns)])  # more may be written than is returned
            return None if not returned else returned[0] if len(returned) == 1 else returned
        result = self._run(lambda: func(*args, **kwargs), reads, writes, label)
        used = {*reads, *writes}
        new = [t for t in _tensors(result) if memory_of(t) not in used]
        if self._own_pool is not None:
            keep_apart(new, self._own_pool)
        if fresh := [memory_of(t) for t in new]:
            emulator.run_on_stream(
                self.handle, _nothing, writes=fresh, label=f"{self.label}: result of {func.name()}"
            )
        if not _tensors(result):  # a number for the host: torch synchronises with the stream
            synchronize(self.handle)
        return result

    def _run(self, fn: Callable[[], Any], reads: list[Range], writes: list[Range], label: str) -> Any:
        outcome: list[Any] = []
        ended = threading.Event()

        def task() -> None:
            try:
                outcome.append(_below_autograd(fn))
            except BaseException as error:
                outcome.append(_Raised(error))
            finally:
                ended.set()

        emulator.run_on_stream(self.handle, task, reads, writes, label)
        if not ended.wait(STUCK_S):
            raise TimeoutError(f"{label} was not reached: its stream is stuck")
        if isinstance(outcome[0], _Raised):
            raise outcome[0].error
        return outcome[0]


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_METADATA = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh", "aten::set_.source_Storage"})


def _is_hosts() -> bool:
    """Does an operation come from code whose tensors are the CPU's on a GPU machine too?"""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_filename.endswith(HOSTS_FILES) or "/bagua_rt/control/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _nothing() -> None:
    pass


def _below_autograd(fn: Callable[[], Any]) -> Any:
    """Run `fn` as what the caller's dispatch has come to: tensors' versions have been counted up already."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return fn()


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation in place writes, in order."""
    result = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            result.append(kwargs[argument.name] if argument.name in kwargs else args[index])
    return result


def memory_of(t: torch.Tensor) -> Range:
    """The memory that a tensor spans."""
    if not t.numel():
        return t.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.element_size()


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`; of a sparse one, what it consists of."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found += [leaf._indices(), leaf._values()] if leaf.is_sparse else [leaf]
    return found


def _accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[Range], list[Range]]:
    reads: list[Range] = []
    writes: list[Range] = []
    for index, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if argument.name in kwargs or index >= len(args) else args[index]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(memory_of(t) for t in _tensors(value))
    return [r for r in reads if r[1]], [w for w in writes if w[1]]


def keep_apart(fresh: Iterable[torch.Tensor], pool: list[torch.Tensor]) -> None:
    """Treat what was just allocated as a stream's own memory for as long as `pool` lives."""
    for t in fresh:
        emulator.forget_accesses(*memory_of(t))
        pool.append(t)


def synchronize(handle: int) -> None:
    """Block the host until the stream is idle, as torch does for ``.item()``."""
    from cuda.bindings import driver

    (status,) = driver.cuStreamSynchronize(handle)
    assert int(status) == 0, status


class EmulatedTorch:
    """`bagua_rt.backends._cuda_torch.TorchSide` on CPU tensors and an emulated compute stream.

    Args:
        index: The device.
    """

    torch_device = torch.device("cpu")

    def __init__(self, index: int = 0) -> None:
        from cuda.core import Device, StreamOptions

        device = Device(index)
        device.set_current()
        self._compute = device.create_stream(options=StreamOptions(nonblocking=True))
        self.compute_handle = int(self._compute.handle)
        self._lanes_pool: list[torch.Tensor] = []

    def current_stream(self) -> int:
        return self.compute_handle

    def is_capturing(self) -> bool:
        return False

    def run(self, stream: int, fn: Callable[[], object]) -> None:
        with torch.no_grad(), StreamOperations(stream, "run", self._lanes_pool):
            fn()

    def empty_on(self, stream: int, size_bytes: int) -> torch.Tensor:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        keep_apart([memory], self._lanes_pool)
        return memory

    @contextmanager
    def on_compute_stream(self) -> Iterator[StreamOperations]:
        """Run the body's torch operations on the compute stream."""
        with StreamOperations(self.compute_handle, "compute") as mode:
            yield mode
        synchronize(self.compute_handle)
