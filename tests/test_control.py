"""The control lane: the ledger by itself, and agreements, maxima and failure news between real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_rt import process_group
from bagua_rt.control import UNSEEN, Control, FailureBoard, LedgerEntry, LedgerResult, Place, pack, unpack
from bagua_rt.errors import ClosedError, CollectiveTimeoutError, LayoutMismatchError, PeerError

if TYPE_CHECKING:
    from tests.ranks import RankContext, RankPool

# ------------------------------------------------------------------------------------------ the ledger


def together(*entries: LedgerEntry) -> LedgerResult:
    reduced = pack(entries[0])
    for entry in entries[1:]:
        reduced = torch.maximum(reduced, pack(entry))
    return unpack(reduced)


def test_one_rank_alone_says_what_it_said() -> None:
    found = together(LedgerEntry(7, 2, b"abcdefgh", [UNSEEN, 0, UNSEEN], aborted=True))
    assert found == LedgerResult(
        generation_differs=False,
        stage_differs=False,
        plan_differs=False,
        steps_differ=False,
        place_differs=False,
        missing_somewhere=[0, 2],
        missing_everywhere=[0, 2],
        any_aborted=True,
        all_aborted=True,
        any_nonfinite=False,
        any_finished=False,
        all_finished=False,
        any_loaded=False,
    )


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        (LedgerEntry(255), LedgerEntry(256), "generation"),
        (LedgerEntry(2**40), LedgerEntry(0), "generation"),
        (LedgerEntry(1, stage=0), LedgerEntry(1, stage=1), "stage"),
        (LedgerEntry(1, plan_digest=b"\0" * 8), LedgerEntry(1, plan_digest=b"\0" * 7 + b"\1"), "plan"),
        (LedgerEntry(1, place=Place.STEP), LedgerEntry(1), "place"),
        (LedgerEntry(1, steps=b"\0" * 8), LedgerEntry(1, steps=b"\xff" * 8), "steps"),
        (LedgerEntry(1, finished=True), LedgerEntry(1, steps=b"\xff" * 8), ""),
        (LedgerEntry(1), LedgerEntry(1), ""),
    ],
)
def test_a_difference_is_found_and_named(one: LedgerEntry, other: LedgerEntry, differing: str) -> None:
    found = together(one, other, one)
    said = {name for name in ("generation", "stage", "plan", "place") if getattr(found, f"{name}_differs")}
    said |= {"steps"} if found.steps_differ else set()
    assert said == ({differing} if differing else set())


@st.composite
def ranks_entries(draw: st.DrawFn) -> list[LedgerEntry]:
    count, parameters = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    flags = st.lists(st.integers(0, 2), min_size=parameters, max_size=parameters)
    small = st.integers(0, 2)
    return [
        LedgerEntry(
            draw(small) + 254,
            draw(small),
            bytes([0] * 7 + [draw(small)]),
            draw(flags),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.booleans()),
            bytes([draw(small)] * 8),
            draw(st.sampled_from(Place)),
            draw(st.booleans()),
        )
        for _ in range(count)
    ]


@given(ranks_entries())
def test_all_ranks_together_against_the_definition(entries: list[LedgerEntry]) -> None:
    found = together(*entries)
    parameters = range(len(entries[0].missing))
    with_data = [e for e in entries if not e.finished]  # the others say nothing about gradients and steps
    assert found == LedgerResult(
        generation_differs=len({e.generation for e in entries}) > 1,
        stage_differs=len({e.stage for e in entries}) > 1,
        plan_differs=len({e.plan_digest for e in entries}) > 1,
        steps_differ=len({e.steps for e in with_data}) > 1,
        place_differs=len({e.place for e in entries}) > 1,
        missing_somewhere=[i for i in parameters if any(e.missing[i] == UNSEEN for e in with_data)],
        missing_everywhere=[i for i in parameters if all(e.missing[i] for e in with_data)],
        any_aborted=any(e.aborted for e in entries),
        all_aborted=all(e.aborted for e in entries),
        any_nonfinite=any(e.nonfinite for e in entries),
        any_finished=any(e.finished for e in entries),
        all_finished=all(e.finished for e in entries),
        any_loaded=any(e.loaded for e in entries),
    )


def test_flags_may_come_as_bytes() -> None:
    assert torch.equal(
        pack(LedgerEntry(1, missing=[False, True])), pack(LedgerEntry(1, missing=bytearray(b"\0\1")))
    )


def test_packing_is_cheap() -> None:
    flags = bytearray(5000)
    best = min(_seconds(lambda: pack(LedgerEntry(1, missing=flags))) for _ in range(200))
    assert best < 100e-6


def _seconds(fn: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


# ------------------------------------------------------------------------------------------ one rank


def test_a_world_of_one_needs_no_group() -> None:
    lane = Control(None, 0, 1, "alone", timeout_s=1.0)
    assert lane.agree("topic", b"payload") == [b"payload"]
    assert lane.broadcast(b"text") == b"text"
    vector = torch.tensor([1, 2], dtype=torch.uint8)
    pending = lane.launch_max(vector)
    assert pending.is_done()
    assert pending.wait().tolist() == [1, 2]
    assert pending.result.data_ptr() != vector.data_ptr()
    lane.failures.post("text")
    assert lane.failures.poll() is None, "there is nobody to tell"
    lane.close()
    lane.close()
    with pytest.raises(ClosedError, match="the control lane alone is closed"):
        lane.agree("topic")


# ------------------------------------------------------------------------------------------ several ranks


def lane_of(ctx: RankContext, timeout_s: float = 40.0) -> tuple[process_group.ProcessGroup, Control]:
    group = process_group.init(
        "cpu", store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size, timeout_s=timeout_s
    )
    return group, group.control("test")


def agree_on_sizes(ctx: RankContext) -> list[Any]:
    group, lane = lane_of(ctx)
    with group:
        sizes = [0, 1, 800, 823, 824, 825, 5000, 1_000_003]
        found = [lane.agree("sizes", bytes([ctx.rank + 1]) * (size + ctx.rank)) for size in sizes]
        lane.close()
    return [[(len(text), set(text)) for text in texts] for texts in found]


@pytest.mark.parametrize("world_size", [2, 3])
def test_agree_gives_every_payload_to_every_rank(pools: Callable[[int], RankPool], world_size: int) -> None:
    answers = pools(world_size).run(agree_on_sizes, timeout=100.0)
    for found in answers:
        for size, texts in zip([0, 1, 800, 823, 824, 825, 5000, 1_000_003], found, strict=True):
            assert texts == [
                (size + rank, {rank + 1} if size + rank else set()) for rank in range(world_size)
            ]


def agree_on_different_topics(ctx: RankContext) -> tuple[str, str]:
    group, lane = lane_of(ctx)
    with group:
        lane.agree("same")
        with pytest.raises(LayoutMismatchError) as first:
            lane.agree("save" if ctx.rank == 1 else "load", b"garbage")
        with pytest.raises(LayoutMismatchError) as second:
            lane.agree("again")
        return str(first.value), str(second.value)


def test_different_topics_are_told_apart_on_every_rank(pools: Callable[[int], RankPool]) -> None:
    for first, second in pools(3).run(agree_on_different_topics, timeout=100.0):
        assert "got 'load' (number 1) on rank 0 and 'save' (number 1) on rank 1" in first
        assert "has failed before" in second


def long_topics(ctx: RankContext) -> bool:
    group, lane = lane_of(ctx)
    with group:
        assert lane.agree("x" * 5000, b"1") == [b"1"] * ctx.world_size
        with pytest.raises(LayoutMismatchError):
            lane.agree("x" * 5000 + str(ctx.rank))
    return True


def test_long_topics_are_compared_as_a_whole(pools: Callable[[int], RankPool]) -> None:
    assert pools(2).run(long_topics, timeout=100.0) == [True, True]


def broadcast_from_each(ctx: RankContext) -> list[bytes]:
    group, lane = lane_of(ctx)
    with group:
        return [
            lane.broadcast(f"from {root}".encode() * 300 if ctx.rank == root else None, root)
            for root in range(ctx.world_size)
        ]


def test_broadcast(pools: Callable[[int], RankPool]) -> None:
    for found in pools(3).run(broadcast_from_each, timeout=100.0):
        assert found == [f"from {root}".encode() * 300 for root in range(3)]


def many_outstanding(ctx: RankContext) -> tuple[list[list[int]], list[int]]:
    group, lane = lane_of(ctx)
    with group:
        vectors = [torch.tensor([i, ctx.rank, 255 - ctx.rank], dtype=torch.uint8) for i in range(20)]
        pending = [lane.launch_max(vector) for vector in vectors]
        assert lane.agree("between")  # runs on a group of its own
        for vector in vectors:
            vector.zero_()  # what was launched was read at once
        found = [one.wait().tolist() for one in reversed(pending)][::-1]
        assert all(one.is_done() for one in pending)
        lane.close()
        return found, [one.sequence for one in pending]


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_maxima_may_be_outstanding(pools: Callable[[int], RankPool], world_size: int) -> None:
    for found, sequences in pools(world_size).run(many_outstanding, timeout=100.0):
        assert found == [[i, world_size - 1, 255] for i in range(20)]
        assert sequences == list(range(20))


def one_rank_is_late(ctx: RankContext) -> tuple[str, float]:
    group, lane = lane_of(ctx)
    with group:
        if ctx.rank == 1:
            time.sleep(3.0)
            return "", 0.0
        pending = lane.launch_max(torch.zeros(4, dtype=torch.uint8))
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            pending.wait(0.5)
        with pytest.raises(CollectiveTimeoutError, match="has failed before"):
            lane.launch_max(torch.zeros(4, dtype=torch.uint8))
        return str(caught.value), time.monotonic() - begin


def test_the_deadline_is_ours(pools: Callable[[int], RankPool]) -> None:
    text, took_s = pools(2).run(one_rank_is_late, timeout=100.0)[0]
    assert "rank 0 waited for control operation 0 (MAX) on job/test#1" in text
    assert "0.5 s" in text
    assert 0.5 <= took_s < 2.5


def one_rank_posts(ctx: RankContext) -> tuple[str, float]:
    group, lane = lane_of(ctx)
    with group:
        lane.agree("start")
        begin = time.monotonic()
        if ctx.rank == 1:
            lane.failures.post("rank 1: the disk is full")
            lane.failures.post("a later text")
            return str(lane.failures.poll()), 0.0
        with pytest.raises(PeerError) as caught:
            lane.agree("never")
        return str(caught.value), time.monotonic() - begin


def test_a_posted_failure_reaches_the_ranks_that_wait(pools: Callable[[int], RankPool]) -> None:
    answers = pools(3).run(one_rank_posts, timeout=100.0)
    assert answers[1][0] == "rank 1: the disk is full"
    for rank in (0, 2):
        assert f"rank {rank} waited for agreement 1 (never) on job/test#1" in answers[rank][0]
        assert "got rank 1: the disk is full" in answers[rank][0]
        assert answers[rank][1] < 2.0  # 0.1 s on a machine of one's own


def one_rank_posts_and_goes(ctx: RankContext, by_ledger: bool) -> str:
    """The connections may end before a rank that waits has looked for news."""
    group, lane = lane_of(ctx)
    with group:
        lane.agree("start")
        if ctx.rank == 1:
            lane.failures.post("rank 1: the disk is full")
            lane.close()
            ctx.store().set("gone", "1")
            return ""
        ctx.store().wait(["gone"], timedelta(seconds=20))
        vector = torch.zeros(4, dtype=torch.uint8)
        with pytest.raises(PeerError) as caught:
            lane.launch_max(vector).wait() if by_ledger else lane.agree("never")
        return str(caught.value)


@pytest.mark.parametrize("by_ledger", [True, False])
def test_a_rank_that_posted_a_failure_and_is_gone_is_heard(
    pools: Callable[[int], RankPool], by_ledger: bool
) -> None:
    text, _ = pools(2).run(one_rank_posts_and_goes, by_ledger, timeout=100.0)
    assert "rank 1: the disk is full" in text


def one_rank_never_comes(ctx: RankContext) -> str:
    group = process_group.init(
        "cpu", store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size, timeout_s=3.0
    )
    with group:
        if ctx.rank != 1:
            with pytest.raises(CollectiveTimeoutError) as caught:
                group.control("test")
            return str(caught.value)
        time.sleep(4.0)
        return ""


def test_a_rank_that_does_not_come_is_named(pools: Callable[[int], RankPool]) -> None:
    for rank, text in enumerate(pools(3).run(one_rank_never_comes, timeout=100.0)):
        if rank != 1:
            assert text.startswith("the control lane job/test#1: rank 1 did not come · expected all 3 ranks")


def one_rank_dies(ctx: RankContext) -> tuple[str, float]:
    import os

    _, lane = lane_of(ctx)
    lane.agree("start")
    if ctx.rank == 1:
        os._exit(5)
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        lane.agree("after")
    return str(caught.value), time.monotonic() - begin


def test_a_rank_that_dies_is_noticed(pools: Callable[[int], RankPool]) -> None:
    answers = pools(2).run(one_rank_dies, expect_errors=True, timeout=100.0)
    assert answers[1].exit_code == 5
    text, took_s = answers[0]
    assert "agreement 1 (after) failed" in text
    assert "losed by peer" in text or "reset by peer" in text
    assert took_s < 2.0


def cost_of_a_maximum(ctx: RankContext) -> float:
    group, lane = lane_of(ctx)
    with group:
        vector = pack(LedgerEntry(1, missing=bytearray(5000)))
        for _ in range(20):
            lane.launch_max(vector).wait()
        times = [_seconds(lambda: lane.launch_max(vector).wait()) for _ in range(200)]
        lane.close()
        return sorted(times)[100]


def test_a_ledger_takes_milliseconds_at_most(pools: Callable[[int], RankPool]) -> None:
    assert max(pools(2).run(cost_of_a_maximum, timeout=100.0)) < 0.02


class EndsLate:
    """gloo's work that ends just after a wait for it was over."""

    def __init__(self, error: str) -> None:
        self.error = error
        self.waits = 0

    def wait(self, _: Any) -> None:
        self.waits += 1
        if self.waits == 1 or self.error:
            raise RuntimeError(self.error if self.waits > 1 else "Operation timed out!")

    def is_completed(self) -> bool:
        return self.waits > 0


def test_an_operation_that_ends_just_after_a_wait_is_no_failure() -> None:
    lane = Control(None, 0, 1, "alone", timeout_s=5.0)
    lane.finish(late := EndsLate(""), "an operation")
    assert late.waits == 2
    with pytest.raises(PeerError, match="Connection closed"):
        lane.finish(EndsLate("Connection closed"), "an operation")


# ------------------------------------------------------------------------------------------ the board alone


def test_a_dead_store_is_told_apart() -> None:
    from torch._C._distributed_c10d import TCPStore

    from bagua_rt.rendezvous import StoreClient

    server: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = server.port
    client = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    board = FailureBoard(StoreClient(client, f"127.0.0.1:{port}", "x/", ("127.0.0.1", port)))
    assert board.poll() is None
    del server
    deadline = time.monotonic() + 5
    while board.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert str(board.poll()).startswith(f"the store at 127.0.0.1:{port} is gone (rank 0 died?)")
    board.post("nobody reads this")  # and nothing raises
    board.close()
    board.close()
