"""Which bucket size is fastest? Tried in the training itself, on the tensors that it has.

Small buckets begin to travel early, large ones travel well; which wins is a matter of the model, the network
and the machine. So each size is used for some steps, twice, the second time in the opposite order, and every
rank takes the same decision from the slowest rank's times. Only the size is searched: what is sent, and what
an element's sum is made of, stay as they are.
"""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bagua_rt.errors import UsageError

_log = logging.getLogger("bagua_rt")
_MIB = 1024 * 1024
_LEAST_GAIN = 0.02  # by which a size must beat the present one: less is noise


@dataclass(frozen=True)
class Tuned:
    """What a search has found.

    Attributes:
        bucket_cap_mb: The size that is in force now, in MiB.
        step_ms: For each size that was tried, in MiB as given, the median time of a step on the slowest rank.
    """

    bucket_cap_mb: float
    step_ms: Mapping[float, float]


class BucketSizeSearch:
    """One search. Every rank makes the same one, and calls `step` before the same steps.

    Args:
        tensor_bytes: The size of each tensor that goes into buckets.
        present_bytes: The size in force; the search includes it.
        candidates_mb: Sizes to try, in MiB. Those that would put everything into one bucket count as one.
        steps: Steps that each size is measured for, twice.
        use: Puts a size, in bytes, into force.
        agree: Gives every rank's bytes to every rank.
        clock_s: Tells the time.

    Attributes:
        present_bytes: The same; it comes back if the search is cancelled.
        found: What came of it; None while it goes on.

    Raises:
        UsageError: there is nothing to choose from, or an argument is not usable.
    """

    def __init__(
        self,
        tensor_bytes: Sequence[int],
        present_bytes: int,
        candidates_mb: Sequence[float],
        steps: int,
        *,
        use: Callable[[int], None],
        agree: Callable[[bytes], list[bytes]],
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check(candidates_mb, steps)
        whole = sum(tensor_bytes)
        self._mb = {present_bytes: present_bytes / _MIB}
        for size_mb in sorted(candidates_mb, reverse=True):
            size = max(1, int(size_mb * _MIB))
            if size < whole or size == present_bytes:
                self._mb[size] = size_mb
            else:  # one bucket for everything, whatever the size
                self._mb.setdefault(max(whole, present_bytes), size_mb)
        sizes = sorted(self._mb)
        if len(tensor_bytes) < 2 or len(sizes) < 2:
            raise UsageError(
                "there is nothing to tune",
                expected="several tensors in buckets, and several sizes that divide them differently",
                got=f"{len(tensor_bytes)} tensors, {whole / _MIB:.3g} MiB in all, in buckets of "
                f"{present_bytes / _MIB:.3g} MiB",
                fix="give smaller candidates_mb, or train without",
            )
        self.present_bytes = present_bytes
        self._queue = [*sizes, *reversed(sizes)]
        self._steps = steps
        self._use, self._agree, self._clock_s = use, agree, clock_s
        self._trying: int | None = None
        self._times: list[float] = []
        self._scores: dict[int, list[float]] = {size: [] for size in sizes}
        self.found: Tuned | None = None

    def step(self) -> bool:
        """The next step begins; between two steps the size may change. Collective now and then.

        Returns:
            Whether the search has ended; `found` tells how.

        Raises:
            CollectiveError: a rank did not come.
        """
        now = self._clock_s()
        self._times.append(now)
        if self._trying is not None and len(self._times) < self._steps + 2:
            return False
        if self._trying is not None:
            self._score(self._trying)
        if not self._queue:
            self._end()
            return True
        self._trying, self._times = self._queue.pop(0), [now]
        self._use(self._trying)
        return False

    def cancel(self) -> None:
        """End the search where it began."""
        self._use(self.present_bytes)

    def _score(self, size: int) -> None:
        """The first interval is left out: new buckets are made in it."""
        mine = statistics.median(end - begin for begin, end in list(pairwise(self._times))[1:])
        answers = self._agree(struct.pack("<d", mine))
        self._scores[size].append(max(struct.unpack("<d", answer)[0] for answer in answers))

    def _end(self) -> None:
        seconds = {size: min(scores) for size, scores in self._scores.items()}
        best = min(seconds, key=lambda size: seconds[size])
        if seconds[best] > (1 - _LEAST_GAIN) * seconds[self.present_bytes]:
            best = self.present_bytes
        if best != self._trying:
            self._use(best)
        self.found = Tuned(self._mb[best], {self._mb[size]: 1e3 * s for size, s in seconds.items()})
        _log.info("buckets of %g MiB from now on; ms a step by MiB: %s", self._mb[best], self.found.step_ms)


def _check(candidates_mb: Sequence[float], steps: int) -> None:
    if not isinstance(candidates_mb, Sequence) or not all(
        isinstance(size, (int, float)) and not isinstance(size, bool) and 0 < size < 1e6
        for size in candidates_mb
    ):
        raise UsageError(
            "candidates_mb is not usable", expected="numbers of MiB above 0", got=repr(candidates_mb)
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError("steps is not usable", expected="a whole number >= 1", got=repr(steps))
