"""A group of ranks: who is where, its communicators, and those of what is attached to it.

[Note: leaders]
    A node is a set of ranks that share a machine, as the launcher or the caller says. `intra_node` joins
    the ranks of this rank's node, in order of local rank; `inter_node` joins the leaders, local rank 0 of
    each node. On one node, `intra_node` is `world` itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bagua_rt.backend import Backend, Communicator, Stream
from bagua_rt.control import CallBoard, Control, FailureBoard
from bagua_rt.errors import ClosedError, UsageError
from bagua_rt.rendezvous import Rendezvous, Seat, StoreClient, arrange_nodes, meet, within_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

open_groups: list[ProcessGroup] = []
_LATEST = 4  # control lanes whose news are still looked for, closed ones too


@dataclass(frozen=True)
class Communicators:
    """The communicators of one attachment, on lanes of its own.

    Attributes:
        world: All ranks of the group.
        intra_node: The ranks of this node; None where not asked for.
        inter_node: The leaders of all nodes; None where not asked for, and where this rank is no leader.
        lanes: The streams that they issue on.
        node_sizes: Number of ranks on each node.
    """

    world: Communicator
    intra_node: Communicator | None
    inter_node: Communicator | None
    lanes: tuple[Stream, ...]
    node_sizes: tuple[int, ...]
    _release: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def each(self) -> list[Communicator]:
        """The communicators, each once."""
        found: list[Communicator] = []
        for communicator in (self.world, self.intra_node, self.inter_node):
            if communicator is not None and all(communicator is not other for other in found):
                found.append(communicator)
        return found

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has put on the wire."""
        return sum(communicator.bytes_sent for communicator in self.each())

    def abort(self) -> None:
        """Abort every communicator: operations that wait for a peer end with an error."""
        for communicator in self.each():
            communicator.abort()

    def close(self) -> None:
        """Close the communicators, and the lanes if they were made for them. Idempotent."""
        for communicator in reversed(self.each()):
            communicator.close()
        self._release()


@dataclass
class Job:
    """What all groups of one `init` share."""

    backend: Backend
    meeting: Rendezvous | None  # None: a world of one rank, without a store
    wiring: StoreClient | None  # for making groups, whose libraries block the client that they use
    boards: StoreClient | None  # for the boards of communicators, used from any thread
    store: Store
    timeout_s: float
    check: bool

    def close(self) -> None:
        with contextlib.ExitStack() as steps:  # last first, and each of them whatever the others raise
            steps.callback(self.backend.close)
            if self.meeting is not None:
                steps.callback(self.meeting.leave)
            for client in (self.wiring, self.boards):
                if client is not None:
                    steps.callback(client.close)


class ProcessGroup:
    """A group of ranks; made by `init` and `new_group`, a context manager that closes it.

    Attributes:
        name: Its name in messages.
        rank: This process's rank in the group.
        world_size: Number of ranks.
        local_rank: Rank on this node, within the group.
        local_world_size: Number of the group's ranks on this node.
        node_rank: Number of this node.
        node_count: Number of nodes.
        node_sizes: Number of ranks on each node.
        device: The torch device.
        backend: The backend.
        store: The rendezvous store, for use from the thread that called `init`.
        timeout_s: The deadline of every wait that names none.
        lanes: Number of lanes.
        world: Communicator of all ranks.
        intra_node: Communicator of this node ([Note: leaders]).
        inter_node: Communicator of the leaders; None where this rank is none.

    Raises:
        CollectiveTimeoutError: a rank did not come to make the group; names it.
    """

    def __init__(
        self, job: Job, seats: Sequence[Seat], rank: int, name: str, lanes: int, *, owns_job: bool = False
    ) -> None:
        self._job = job
        self._owns_job = owns_job
        self._seats = tuple(seats)
        self._nodes = arrange_nodes(self._seats)
        self._pid = os.getpid()
        self._is_closed = False
        self._made: dict[str, int] = {}
        self._latest_lanes: deque[tuple[StoreClient, FailureBoard]] = deque(maxlen=_LATEST)
        self._on_close: list[Callable[[], None]] = []
        self.name = name
        self.rank = rank
        self.world_size = len(self._seats)
        self.node_rank = next(i for i, node in enumerate(self._nodes) if rank in node)
        self.local_rank = self._nodes[self.node_rank].index(rank)
        self.node_sizes = tuple(len(node) for node in self._nodes)
        self.node_count = len(self._nodes)
        self.local_world_size = self.node_sizes[self.node_rank]
        self.backend = job.backend
        self.device = job.backend.device.torch_device
        self.store = job.store
        self.timeout_s = job.timeout_s
        self.lanes = lanes
        self._communicators = self.connect("group", lanes, hierarchical=True, for_calls=True)
        self.world = self._communicators.world
        self.intra_node = self._communicators.intra_node
        self.inter_node = self._communicators.inter_node
        open_groups.append(self)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._is_closed else ""
        return f"<ProcessGroup {self.name!r} rank {self.rank} of {self.world_size} on {self.device}{state}>"

    @property
    def is_closed(self) -> bool:
        """Is it closed, or does it belong to the process that forked this one?"""
        return self._is_closed or self._pid != os.getpid()

    def new_group(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Make a group of some of the ranks. Collective over these; others need not call.

        Args:
            ranks: Ranks of this group, in any order; the new group numbers them in ascending order.

        Returns:
            The group, None where this rank is not in it. The same ranks again make another group.

        Raises:
            UsageError: a rank is not one of this group, or given twice, or there is none.
            CollectiveTimeoutError: a member did not call; names it (as numbered in the new group).
            ClosedError: the group is closed, or belongs to the process that forked this one.
        """
        self._check()
        if not isinstance(ranks, Iterable) or isinstance(ranks, str):
            raise UsageError(
                "these ranks make no group", expected="a list of ranks of this group", got=repr(ranks)
            )
        members = sorted(_checked_rank(rank, self.world_size) for rank in ranks)
        if not members or len(set(members)) != len(members):
            raise UsageError(
                "these ranks make no group", expected="one rank or more, each once", got=f"{list(ranks)}"
            )
        if self.rank not in members:
            return None
        spelled = "-".join(map(str, members))
        if len(spelled) > 40:
            spelled = f"{len(members)}of{self.world_size}-{hashlib.sha256(spelled.encode()).hexdigest()[:12]}"
        name = f"{self.name}.{self._numbered(spelled)}"
        seats = within_group(self._nodes, self._seats, members)
        group = ProcessGroup(self._job, seats, members.index(self.rank), name, self.lanes)
        group.on_close(self.on_close(group.close))
        return group

    def connect(
        self,
        name: str,
        lanes: Sequence[Stream] | int,
        hierarchical: bool = False,
        *,
        for_calls: bool = False,
    ) -> Communicators:
        """Make communicators of their own for an attachment. Collective over the group.

        Args:
            name: The same on every rank; used again, it makes others.
            lanes: The streams to issue on, or how many to make.
            hierarchical: Make intra-node and inter-node communicators as well.
            for_calls: The user's own calls go there: they are compared if `init` was told to, and the ranks
                tell one another what they wait for.

        Returns:
            The communicators; close them before the group.

        Raises:
            UsageError: there is no lane.
            CollectiveTimeoutError: a rank did not come; names it.
            PeerError: the store is gone.
            ClosedError: the group is closed, or belongs to the process that forked this one.
        """
        self._check()
        count = lanes if isinstance(lanes, int) else len(lanes)
        if count < 1:
            raise UsageError("communicators need a lane", expected="one lane or more", got=f"{count}")
        name = f"{self.name}/{self._numbered(name)}"
        keys = None
        if self._job.wiring is not None:
            keys = self._job.wiring.under(f"group/{name}")
            what = f"making the communicators {name}"
            meet(keys, self.rank, self.world_size, self.timeout_s, what, self._news)
        owned: list[Stream] = []
        with contextlib.ExitStack() as undo:
            undo.callback(_close_streams, self.backend, owned)
            if isinstance(lanes, int):
                for i in range(lanes):
                    owned.append(self.backend.device.new_stream(f"{name}/lane{i}"))  # noqa: PERF401 - undo sees each
                lanes = owned
            made = self._hierarchy(keys, undo, name, tuple(lanes), hierarchical, for_calls)
            undo.pop_all()
        release = partial(_close_streams, self.backend, owned)
        return Communicators(*made, tuple(lanes), self.node_sizes, release)

    def _hierarchy(
        self,
        keys: StoreClient | None,
        undo: contextlib.ExitStack,
        name: str,
        lanes: tuple[Stream, ...],
        hierarchical: bool,
        for_calls: bool,
    ) -> tuple[Communicator, Communicator | None, Communicator | None]:
        """World, intra-node and inter-node communicators; `undo` closes what was made."""

        def join(part: str, ranks: Sequence[int]) -> Communicator:
            store = self.store if keys is None else keys.prefixed(part)
            own, size, title = ranks.index(self.rank), len(ranks), f"{name}/{part}"
            made = self.backend.connect(store, own, size, title, lanes, timeout_s=self.timeout_s)
            undo.callback(made.close)
            if for_calls and size > 1 and self._job.boards is not None:
                client = self._job.boards.under(f"board/{title}")
                made.use_board(CallBoard(client, title, own, size, self.timeout_s, self._job.check))
            return made

        world = join("world", range(self.world_size))
        if not hierarchical:
            return world, None, None
        leaders = [node[0] for node in self._nodes]
        one_node = self.node_count == 1
        intra = world if one_node else join(f"intra{self.node_rank}", self._nodes[self.node_rank])
        return world, intra, join("inter", leaders) if self.rank in leaders else None

    def control(self, name: str) -> Control:
        """Make a control lane. Collective over the group.

        Args:
            name: The same on every rank; used again, it makes another.

        Returns:
            The lane; close it before the group.

        Raises:
            CollectiveTimeoutError: a rank did not come; names it.
            PeerError: the store is gone.
            ClosedError: the group is closed, or belongs to the process that forked this one.
        """
        self._check()
        name = f"{self.name}/{self._numbered(name)}"
        wiring = self._job.wiring
        keys = None if wiring is None else wiring.under(f"control/{name}")
        lane = Control(keys, self.rank, self.world_size, name, timeout_s=self.timeout_s, news=self._news)
        if keys is not None:
            self._latest_lanes.append((keys, lane.failures))
        return lane

    def _news(self) -> str | None:
        """What another rank failed with where this one has been, without hearing of it: it went on, and waits
        elsewhere now, maybe for a rank that died."""
        for keys, board in self._latest_lanes:
            if not board.is_known and (failure := keys.glance(board.KEY)) is not None:
                board.is_known = True  # told once
                return failure.decode(errors="replace")
        return None

    def refuse(self, name: str, reason: str) -> None:
        """Tell the ranks that make the control lane `name` that this rank does not: they raise UsageError.

        Args:
            name: As this rank would have given it to `control`.
            reason: Why.
        """
        self._check()
        name = f"{self.name}/{self._numbered(name)}"
        if self._job.wiring is not None:
            self._job.wiring.under(f"control/{name}").set("refused", f"rank {self.rank}: {reason}")

    def meeting_keys(self, *made: str) -> list[str]:
        """What ranks have written to the store to meet each other, for control lanes and communicators.

        Args:
            made: Names of control lanes, and of communicators without their last part.

        Returns:
            On rank 0 the keys, for `forget_keys` once all ranks have met; none on the others.
        """
        wiring = self._job.wiring
        if wiring is None or self.rank != 0:
            return []
        parts = [f"control/{name}/{part}/" for name in made for part in ("here", "gloo")]
        keys = wiring.keys_under(*parts, *(f"group/{name}/" for name in made))
        return [key for key in keys if "/turn/" not in key]  # counters, which a later split goes on with

    def forget_keys(self, keys: Sequence[str]) -> None:
        """Remove `keys` from the store, which would grow with every attachment else."""
        if self._job.wiring is not None:
            self._job.wiring.delete(keys)

    def on_close(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Have `fn` called when the group closes, before its communicators do; the last registered first.

        Args:
            fn: Called at most once.

        Returns:
            Call it to take the registration back.
        """
        self._on_close.append(fn)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._on_close.remove(fn)

        return forget

    def close(self) -> None:
        """Close what was attached, then the group. Idempotent; in a forked child it does nothing.

        Raises:
            BaseException: the first error of a callback registered with `on_close`; all else is closed.
        """
        if self.is_closed or self not in open_groups:
            return
        open_groups.remove(self)
        with contextlib.ExitStack() as steps:  # runs every step, last first, and raises what the steps raised
            if self._owns_job:
                steps.callback(self._job.close)
            steps.callback(self._mark_closed)
            steps.callback(self._communicators.close)
            while self._on_close:
                steps.callback(self._on_close.pop(0))

    def _mark_closed(self) -> None:
        self._is_closed = True

    def _numbered(self, name: str) -> str:
        """`name` with a number, so that the same name again gives other keys."""
        self._made[name] = self._made.get(name, 0) + 1
        return f"{name}#{self._made[name]}"

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("this process group belongs to the process that forked this one")
        if self._is_closed:
            raise ClosedError("this process group is closed", fix="call init() again")


def _close_streams(backend: Backend, streams: list[Stream]) -> None:
    for stream in streams:
        backend.device.close_stream(stream)


def _checked_rank(rank: Any, world_size: int) -> int:
    if not isinstance(rank, Integral) or isinstance(rank, bool) or not 0 <= int(rank) < world_size:
        raise UsageError(
            "this is no rank of the group",
            expected=f"whole numbers from 0 to {world_size - 1}",
            got=repr(rank),
        )
    return int(rank)
