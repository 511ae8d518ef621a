"""`Attached`: a model that trains data-parallel, as its trainer sees it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context
from bagua_rt.attach import checkpoint, refusals
from bagua_rt.attach.agreement import agree_on, on_all_ranks
from bagua_rt.attach.backward import is_running
from bagua_rt.attach.buffers import Buffers
from bagua_rt.attach.engine import Engine
from bagua_rt.attach.hooks import Hooks
from bagua_rt.attach.join import Join, ending_together
from bagua_rt.attach.names import NamedTensors
from bagua_rt.attach.resources import Resources
from bagua_rt.autotune import Tuned
from bagua_rt.bucket import BucketPlan
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import BaguaError, ClosedError, UsageError
from bagua_rt.scheduler import Round
from bagua_rt.trace import Statistics, Trace

_log = logging.getLogger("bagua_rt")


class Attachment:
    """What an attachment consists of; its handle may be collected, its end is always `detach`."""

    def __init__(
        self,
        named: NamedTensors,
        context: Context,
        algorithm: Algorithm,
        engine: Engine,
        hooks: Hooks,
        resources: Resources,
        buffers: Buffers,
        broadcast_buffers: bool,
        trace_dir: Path | None,
    ) -> None:
        self.named = named
        self.context = context
        self.algorithm = algorithm
        self.engine = engine
        self.hooks = hooks
        self.resources = resources
        self.trace = Trace(context.world.rank, context.world_size, resources.name)
        self.is_closed = False
        self._trace_dir = trace_dir
        self.buffers = buffers
        self._broadcasts = broadcast_buffers and context.world_size > 1
        engine.pipeline.on_failure = self.write_flight_record
        if trace_dir is not None:
            self.start_trace()

    def before_forward(self, training: bool) -> None:
        """Broadcast the buffers, and let the engine open what begins at a forward."""
        self.engine.on_forward(training)
        if self.engine.is_synchronised and self.engine.join is None and self.engine.is_in_step:
            self.broadcast_buffers()

    def broadcast_buffers(self, root: int = 0) -> None:
        """Make the buffers those of rank `root`, if that was asked for."""
        if self._broadcasts:
            self.engine.meet_before_buffers()
            self.buffers.broadcast(root)

    def start_trace(self) -> None:
        """Record spans from now on."""
        self.trace.start()
        self.engine.pipeline.is_timed = True
        self.engine.pipeline.on_round_complete = self._trace_round

    def stop_trace(self) -> None:
        """Record no more."""
        self.trace.stop()
        self.engine.pipeline.is_timed = False
        self.engine.pipeline.on_round_complete = None

    def _trace_round(self, round_: Round, began_us: float, ended_us: float) -> None:
        device, lanes = self.context.device, self.context.communicators.lanes
        self.trace.add("exposed communication", "trainer", began_us, ended_us, round=round_.number)
        for bucket, ready, launched_us, sent, done in zip(
            self.engine.buckets, round_.ready, round_.launched_us, round_.sent, round_.done, strict=True
        ):
            if ready is None or done is None:
                continue
            name, lane = f"bucket {bucket.index}", lanes[bucket.plan.lane].name
            ready_us, done_us, parameters = (
                device.time_us(ready),
                device.time_us(done),
                list(bucket.plan.names),
            )
            which = {
                "round": round_.number,
                "bucket": bucket.index,
                "bytes": bucket.plan.nbytes,
                "sent": sent,
            }
            self.trace.add(f"{name} in queue", "queue", ready_us, launched_us, **which)
            self.trace.add(name, lane, launched_us, done_us, **which, parameters=parameters)

    def flight_record(self) -> dict[str, Any]:
        """What this rank is doing, and the last operations of each of its communicators."""
        world = self.context.world
        return {
            "rank": world.rank,
            "world_size": world.world_size,
            "attachment": self.resources.name,
            "doing": self.engine.describe(),
            "communicators": {
                communicator.name: communicator.flight_record()
                for communicator in self.context.communicators.each()
            },
        }

    def write_flight_record(self, error: BaguaError) -> None:
        """Write the flight record of an attachment that fails; a disk that refuses it is only logged."""
        folder = RuntimeConfig.from_environment().flight_dir
        name = self.resources.name.replace(os.sep, "_")
        path = folder / f"{name}.rank{self.context.world.rank}.{os.getpid()}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"error": str(error), **self.flight_record()}, indent=1))
        except OSError as refusal:
            _log.warning("the flight record could not be written: %s", refusal)
        else:
            _log.warning("the flight record is in %s", path)

    def detach(self, *, orderly: bool) -> None:
        """Undo everything that attaching did. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.hooks.remove()
        try:
            self.engine.close(orderly=orderly)
            self.engine.background.leave(sys.exc_info()[1])  # an exception on its way may be why it closes
        finally:
            self.resources.close()
            if not orderly:  # what the others meet there from now on is this rank's doing, and no news to it
                self.resources.control.failures.is_known = True
            if self._trace_dir is not None:
                self._write_trace(self._trace_dir)

    def _write_trace(self, folder: Path) -> None:
        try:
            self.trace.write_chrome(folder)
        except OSError as refusal:  # the training that ends here is worth more than its trace
            _log.warning("the trace could not be written: %s", refusal)


def _bound(algorithm: Algorithm, context: Context) -> AlgorithmState:
    if not isinstance(algorithm, Algorithm):
        raise UsageError("switch() got no algorithm", expected="an Algorithm", got=repr(algorithm))
    return algorithm.bind(context)


def _collected(attachment: Attachment, name: str) -> None:
    """The handle is gone. Without it nobody can close the attachment, so it ends here."""
    if not attachment.is_closed:
        text = (
            f"the handle of attach() for {name} was collected, so the model is detached; keep or close() it"
        )
        warnings.warn(text, ResourceWarning, stacklevel=2)
        _log.warning(text)  # Python hides the other, and what is trained from here on is not synchronised
        attachment.detach(orderly=False)


class Attached:
    """A model that trains data-parallel. Made by `attach`; keep it as long as the model trains.

    The model stays the object it was. Also a context manager, which closes it. A copied or unpickled handle
    is as one that was closed: it belongs to a copy of a model, which is not attached.
    """

    def __init__(self, attachment: Attachment, name: str) -> None:
        self._made: Attachment | None = attachment
        self._name = name
        finalizer = weakref.finalize(self, _collected, attachment, name)
        finalizer.atexit = False

    @classmethod
    def _copied(cls, name: str) -> Attached:
        copied = cls.__new__(cls)
        copied._made, copied._name = None, name
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        return self._copied(self._name)

    def __reduce__(self) -> tuple[Callable[[str], Attached], tuple[str]]:
        return self._copied, (self._name,)

    @property
    def _attachment(self) -> Attachment:
        if self._made is None:
            raise ClosedError(
                f"this is a copy of the handle of {self._name}, whose model is a copy that is not attached",
                fix="call attach() for the copy of the model",
            )
        return self._made

    def __repr__(self) -> str:
        if self._made is None or self.is_closed:
            return f"<bagua_rt.Attached {self._name}, closed>"
        world, buckets = self._made.context.world, len(self._made.engine.buckets)
        return (
            f"<bagua_rt.Attached {self._name}, rank {world.rank} of {world.world_size}, {buckets} buckets, "
            f"{self._made.algorithm}>"
        )

    @property
    def is_closed(self) -> bool:
        """Is the model no longer attached?"""
        return self._made is None or self._made.is_closed

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use."""
        return self._attachment.algorithm

    @property
    def bit_equal(self) -> bool:
        """Do all ranks hold the same weights, to the bit, after each step, with this algorithm?

        Buffers are each rank's own from a forward to the next, which makes them rank 0's.
        """
        return self._attachment.engine.state.bit_equal

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """The present plan, in launch order: names, real sizes and lanes."""
        return tuple(bucket.plan for bucket in self._attachment.engine.buckets)

    @property
    def trace(self) -> Trace:
        """Recorded spans."""
        return self._attachment.trace

    @contextmanager
    def tracing(self, path: str | Path) -> Iterator[Trace]:
        """Record spans inside, then write one Chrome trace of them per rank.

        Args:
            path: A folder, or a file that ends in ``.json``; each rank writes one of its own, see
                `Trace.write_chrome`.

        Raises:
            OSError: the file can't be written.
            CollectiveError: with ``commit="stream"``, the last communication failed.
        """
        attachment = self._open()
        was_on, began_us = attachment.trace.is_on, time.perf_counter_ns() / 1000
        attachment.start_trace()
        try:
            yield attachment.trace
            attachment.engine.pipeline.confirm()  # where only the device has waited, the last round is unseen
        finally:
            if not was_on:  # else the whole run is traced
                attachment.stop_trace()
            attachment.trace.write_chrome(path, since_us=began_us)

    def no_sync(self) -> Any:
        """Within this context manager backwards accumulate locally; may be nested.

        It is where the *backward* runs that counts: a forward inside with its backward outside synchronises,
        and the backward outside reduces all that was accumulated. A step() while gradients are only local
        raises UsageError.
        """
        return self._open().engine.no_sync()

    @contextmanager
    def join(
        self, divide_by_initial: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Around a training loop whose number of batches differs between ranks.

        A rank that leaves early takes part in the others' generations with zeros, until all are done; then
        all take the model and optimizer state of the last. Inside, forwards send nothing, so one may come to
        nothing; buffers are broadcast after each generation, from the first rank that still has data. Joins
        of several models may be nested, in one order on all ranks; they end together, with the outermost.

        Args:
            divide_by_initial: Means divide by the number of all ranks; else by those that still have data.
            throw_on_early_termination: Raise PeerError on all ranks when the first one has no more data.

        Raises:
            UsageError: the algorithm can't be joined.
            LayoutMismatchError: the ranks' arguments differ.
            PeerError: in the throwing mode.
        """
        attachment = self._between_steps("join()")
        engine = attachment.engine
        with ending_together(attachment) as at_the_end:  # [Note: joins end together]
            engine.give_up_lost_backward()
            engine.settle()
            engine.join = join = Join(
                attachment,
                divide_by_initial=divide_by_initial,
                throw_on_early_termination=throw_on_early_termination,
            )
            try:
                yield
                engine.give_up_lost_backward()
            except Exception:
                at_the_end(join.leave)
                raise
            except BaseException:
                engine.join = None
                raise
            at_the_end(join.finish)

    def autotune(
        self, candidates_mb: Sequence[float] = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0), steps: int = 10
    ) -> None:
        """Search the bucket size with which steps take least time, in the steps to come; collective.

        Each size is in force twice, for `steps` + 1 generations, then the fastest stays: the present one,
        where none beats it by 2 %. `tuned` tells, and a checkpoint keeps it. Training goes on meanwhile. Sums
        are those of the same numbers; on three ranks and more their order, so their last bits, may depend on
        the size, as with ``bucket_cap_mb``. A switch()
        ends the search.

        Args:
            candidates_mb: Most MiB in a bucket, to be tried beside the present ``bucket_cap_mb``.
            steps: Steps that each size is measured for.

        Raises:
            UsageError: the algorithm's results depend on the buckets, there is nothing to choose from, an
                argument is not usable, or a search is under way; on every rank, if on one.
            LayoutMismatchError: the ranks' arguments differ, or they are out of step.
        """
        attachment = self._between_steps("autotune()")
        engine, control = attachment.engine, attachment.resources.control
        engine.halt(takes=False)
        search = on_all_ranks("autotune()", control, lambda: engine.layout.new_search(candidates_mb, steps))
        agree_on([("autotune()", f"{candidates_mb}, {steps}"), *engine.accord.describe()], control)
        engine.layout.search = search

    @property
    def tuned(self) -> Tuned | None:
        """What `autotune` has found; None while it searches, or was never asked to."""
        search = self._attachment.engine.layout.search
        return None if search is None else search.found

    def statistics(self) -> Statistics:
        """Totals since attach; see bagua_rt.trace for the definitions."""
        attachment = self._attachment
        communicators = attachment.context.communicators
        pipeline = attachment.engine.pipeline
        return Statistics(
            generations=attachment.engine.generations - attachment.engine.accord.generations_loaded,
            buckets=len(attachment.engine.buckets),
            bytes_sent=communicators.bytes_sent,
            communication_us=pipeline.busy_us,
            exposed_us=pipeline.exposed_us,
            hidden_us=max(0.0, pipeline.busy_us - pipeline.busy_while_exposed_us),
        )

    def flight_record(self) -> dict[str, Any]:
        """The last operations of this rank, as plain values; written to a file when the attachment fails."""
        return self._open().flight_record()

    def pause(self) -> None:
        """End the rounds that run in the background (AsyncModelAverage); collective.

        Each rank takes part in rounds until all ranks have come here. The last one is a round in which nobody
        has moved, so all ranks hold the same weights afterwards. Call it between steps: the weights move.

        Raises:
            UsageError: the algorithm has no such rounds.
            PeerError: a rank has left.
            CollectiveTimeoutError: a rank has come to no safe point for too long.
        """
        engine = self._with_background("pause()")
        engine.halt(takes=True)
        engine.background.pause()

    def resume(self) -> None:
        """Let rounds run again after `pause`; collective.

        Raises:
            UsageError: the algorithm has no such rounds.
            CollectiveError: a rank did not come.
        """
        engine = self._with_background("resume()")
        engine.pipeline.raise_failure()
        engine.background.resume()

    def switch(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm, on all ranks or on none; collective.

        Weights and optimizer state stay what they are on each rank. Rounds in the background end first, once
        all ranks have come here, and no longer move the weights.

        Args:
            algorithm: The new algorithm; the same on every rank.

        Raises:
            UsageError: it can't do this model, world or optimizer; on every rank, if on one.
            LayoutMismatchError: the ranks switch to different algorithms, or are out of step.
        """
        attachment = self._between_steps("switch()")
        engine, control = attachment.engine, attachment.resources.control
        engine.halt(takes=False)
        state = on_all_ranks("switch()", control, lambda: _bound(algorithm, attachment.context))
        try:
            agree_on([("the algorithm", repr(algorithm)), *engine.accord.describe()], control)
        except Exception:
            state.close()
            raise
        engine.replace_state(state)
        attachment.algorithm = algorithm

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the states of the model and the optimizers.

        Per rank: every rank saves its own.
        """
        attachment = self._between_steps("state_dict()")
        attachment.engine.settle()
        return checkpoint.save(attachment)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, on all ranks or on none; collective.

        Raises:
            UsageError: it belongs to another algorithm or model; on every rank, if on one.
            LayoutMismatchError: the ranks' checkpoints are not of one moment.
            Exception: what the algorithm's state met on this rank.
        """
        attachment = self._between_steps("load_state_dict()")
        attachment.engine.halt(takes=False)
        checkpoint.load(attachment, state)

    def close(self) -> None:
        """End the attachment: model and optimizers are as they were; gradients stay readable. Idempotent.

        Where rounds run in the background, it waits until all ranks close; they hold the same weights then.
        After a failure the gradients that are in buckets are dropped: what was aborted may still write there.
        """
        if self._made is not None:
            self._made.detach(orderly=True)

    def _with_background(self, call: str) -> Engine:
        engine = self._between_steps(call).engine
        if engine.state.interval_s is None:
            raise refusals.no_background(self.algorithm.name)
        return engine

    def _between_steps(self, call: str) -> Attachment:
        attachment = self._open()
        if is_running():
            raise refusals.call_in_backward(call)
        return attachment

    def _open(self) -> Attachment:
        if self._attachment.is_closed:
            raise ClosedError(f"the attachment {self._name} was closed", fix="call attach() again")
        return self._attachment

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *exc: object) -> None:
        self._attachment.detach(orderly=exc[0] is None)
