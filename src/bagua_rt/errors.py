"""The error tree, and the one way its messages are written.

::

    BaguaError
    ├── UsageError (ValueError)          the call, or the ranks' calls together, can't be right
    │   ├── UnusedParameterError         a parameter got no gradient in a synchronised backward
    │   └── LayoutMismatchError          the ranks' models, plans or stages differ
    ├── ClosedError                      the object was closed, or inherited through fork
    ├── BackendUnavailableError          a device or library that was asked for is not there
    ├── LibraryError                     a library returned a status that is not success
    │   ├── CudaError
    │   ├── NvrtcError
    │   └── NcclError
    ├── CollectiveError                  a collective did not complete
    │   ├── CollectiveTimeoutError (TimeoutError)
    │   └── PeerError                    another rank died, failed, or gave up
    └── InternalError                    a broken invariant of this package: please report it

A message says what happened, what was expected, what was found and what to do about it.
"""

from __future__ import annotations


class BaguaError(Exception):
    """Root of every error that this package raises on purpose.

    Args:
        what: What happened, as a sentence without its full stop.
        expected: What would have been right.
        got: What was found instead.
        fix: What the reader can do about it.
    """

    def __init__(self, what: str, *, expected: str = "", got: str = "", fix: str = "") -> None:
        parts = [what]
        if expected:
            parts.append(f"expected {expected}")
        if got:
            parts.append(f"got {got}")
        if fix:
            parts.append(fix)
        super().__init__(" · ".join(parts))


class UsageError(BaguaError, ValueError):
    """A call, or the calls of all ranks taken together, that can't be right."""


class UnusedParameterError(UsageError):
    """A parameter received no gradient in a synchronised backward, on some rank."""


class LayoutMismatchError(UsageError):
    """The ranks' models, bucket plans, optimizers or stages differ."""


class ClosedError(BaguaError):
    """The object was closed, or belongs to the process that forked this one."""


class BackendUnavailableError(BaguaError):
    """A device or a library that was asked for is not there; lists what was looked for."""


class LibraryError(BaguaError):
    """A library call returned a status that is not success."""


class CudaError(LibraryError):
    """A CUDA driver call failed."""


class NvrtcError(LibraryError):
    """NVRTC could not compile a kernel; the message holds its log."""


class NcclError(LibraryError):
    """An NCCL call failed."""


class CollectiveError(BaguaError):
    """A collective did not complete on this rank."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A deadline passed before a collective, or a rendezvous, completed."""


class PeerError(CollectiveError):
    """Another rank died, failed, or gave this generation up."""


class InternalError(BaguaError):
    """An invariant of this package does not hold: a defect to report."""


def interrupted(error: BaseException) -> BaguaError:
    """`error` itself, if it is of this package; else what it means to the ranks: one has left its wait.

    Args:
        error: What a wait for other ranks was left by: KeyboardInterrupt, or what a signal handler raised.
    """
    if isinstance(error, BaguaError):
        return error
    return CollectiveError(
        "a wait for the other ranks was left by an exception",
        got=": ".join(filter(None, [type(error).__name__, str(error)])),
        fix="close() and attach() again on every rank to go on",
    )
