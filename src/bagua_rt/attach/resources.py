"""What an attachment owns outside of the model: lanes, communicators, a control lane and its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bagua_rt.attach.agreement import Line, agree_on
from bagua_rt.control import Control, Ticker
from bagua_rt.errors import interrupted
from bagua_rt.process_group import Communicators, ProcessGroup
from bagua_rt.scheduler import EventLoop, Pipeline

_TOPIC = "attach"  # ranks that give their attachments different names still meet, and hear of it


@contextmanager
def telling_refusals(group: ProcessGroup) -> Iterator[None]:
    """An error in here keeps this rank from attaching: the others hear why, and raise as well."""
    try:
        yield
    except Exception as error:
        group.refuse(_TOPIC, f"{type(error).__name__}: {error}")
        raise


class Resources:
    """Made at attach, collectively; closed by each rank on its own.

    Every attachment has lanes, groups and a loop of its own, so that two models in one process never wait
    for each other's order of launches.

    Args:
        group: The process group.
        name: The attachment's name; None takes its number in the group.
        lines: What the ranks must have in common.

    Raises:
        UsageError: a rank refused to attach; tells why.
        LayoutMismatchError: the ranks differ.
        CollectiveError: a rank did not come.
    """

    def __init__(self, group: ProcessGroup, name: str | None, lines: Sequence[Line]) -> None:
        self.group = group
        self.describe: Callable[[], str] = lambda: "attaching a model"
        self.listen: Callable[[], None] = lambda: None
        self._undo = ExitStack()
        with ExitStack() as undo:
            self.control: Control = group.control(_TOPIC)
            undo.callback(self.control.close)
            undo.push(self._tell_failure)
            agree_on([*lines, ("the attachment's name", repr(name))], self.control)
            lane = self.control.name
            number = int(lane.rpartition("#")[2])  # counts refused ones too: equal on all ranks
            self.name = name = name or f"model{number - 1}"
            self.control.name = f"{group.name}/{name}"
            self.communicators: Communicators = group.connect(name, group.lanes, hierarchical=True)
            undo.callback(self.communicators.close)
            self._made = lane, self.communicators.world.name.rpartition("/")[0]
            self.loop = EventLoop(f"bagua_rt/{name}")
            undo.callback(self.loop.close)
            undo.callback(Ticker(f"bagua_rt/{name}/ticker", self._answer).close)
            self._undo = undo.pop_all()
        self.pipeline = Pipeline(
            self.loop,
            group.backend.device,
            self.communicators,
            self.control,
            name,
        )

    def _tell_failure(self, _: object, error: BaseException | None, __: object) -> None:
        """Ranks that have come further in attach() would wait for this one."""
        if error is not None:
            self.control.failures.post(f"rank {self.control.rank} left attach(): {interrupted(error)}")

    def _answer(self) -> None:
        """On the ticker's thread: tell a rank that waits what this one is doing, and hear what others say."""
        self.control.roll_call.answer(self.describe)
        self.listen()

    def meeting_keys(self) -> list[str]:
        """What the ranks met through, to be forgotten once all of them have attached."""
        return self.group.meeting_keys(*self._made)

    def on_close(self, fn: Callable[[], None]) -> None:
        """Call `fn` when these are closed, before anything else."""
        self._undo.callback(fn)

    def close(self) -> None:
        """Close everything, the threads first. Idempotent."""
        self._undo.close()
