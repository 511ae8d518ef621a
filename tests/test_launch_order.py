"""The launch order: the same for any order of readiness; what it does not have changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_rt.launch_order import BucketState, IllegalTransitionError, LaunchOrder

few_examples = settings(max_examples=150, deadline=None)


@st.composite
def lanes_and_readiness(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lanes = draw(st.lists(st.integers(0, 3), max_size=9))
    return lanes, draw(st.permutations(range(len(lanes))))


@few_examples
@given(lanes_and_readiness(), st.integers(1, 3), st.data())
def test_any_readiness_gives_the_same_launches(
    case: tuple[list[int], list[int]], rounds: int, data: st.DataObject
) -> None:
    lanes, readiness = case
    order = LaunchOrder(lanes)
    for _ in range(rounds):
        order.begin()
        launched: list[tuple[int, int]] = []
        done: list[int] = []
        for count, bucket in enumerate(readiness, start=1):
            order.mark_ready(bucket)
            launched += order.take()
            ready = set(readiness[:count])
            prefix = next((i for i in range(len(lanes)) if i not in ready), len(lanes))
            assert [index for index, _ in launched] == list(range(prefix)), "all that may launch, and no more"
            for index, _ in launched:
                if index not in done and data.draw(st.booleans()):
                    order.mark_done(index)
                    done.append(index)
        assert launched == list(enumerate(lanes)), "each bucket once, in bucket order, on its lane"
        assert order.take() == []
        assert order.is_complete() == (len(done) == len(lanes))
        for index in range(len(lanes)):
            if index not in done:
                order.mark_done(index)
        assert order.is_complete()


Call = tuple[str, int]
calls = st.lists(st.tuples(st.sampled_from(["begin", "mark_ready", "take", "mark_done"]), st.integers(-2, 5)))


def apply(order: LaunchOrder, call: Call) -> None:
    name, bucket = call
    getattr(order, name)(*((bucket,) if name.startswith("mark") else ()))


def states(order: LaunchOrder, count: int) -> list[BucketState]:
    return [order.state(i) for i in range(count)]


def is_legal(call: Call, before: list[BucketState]) -> bool:
    name, bucket = call
    if name == "begin":
        return all(state is BucketState.DONE for state in before)
    if name == "take":
        return True
    wanted = BucketState.PENDING if name == "mark_ready" else BucketState.LAUNCHED
    return 0 <= bucket < len(before) and before[bucket] is wanted


@few_examples
@given(st.integers(0, 4), calls)
def test_illegal_transitions_raise_and_change_nothing(count: int, sequence: list[Call]) -> None:
    order, twin = LaunchOrder(range(count)), LaunchOrder(range(count))
    for call in sequence:
        before = states(order, count)
        if is_legal(call, before):
            apply(order, call)
            apply(twin, call)
        else:
            with pytest.raises(IllegalTransitionError, match=r"bucket|begin\(\) while a round is open"):
                apply(order, call)
            assert states(order, count) == before
        assert states(order, count) == states(twin, count), "the twin has seen the legal calls alone"
    assert order.take() == twin.take()


def test_messages_say_what_is_where() -> None:
    order = LaunchOrder([0, 1])
    with pytest.raises(IllegalTransitionError, match="there is no bucket 2 among 2"):
        order.mark_ready(2)
    order.begin()
    order.mark_ready(1)
    with pytest.raises(IllegalTransitionError, match=r"begin\(\) while a round is open: 0 pending, 1 ready"):
        order.begin()
    with pytest.raises(IllegalTransitionError, match="bucket 1 can't become ready: it is ready, not pending"):
        order.mark_ready(1)
    with pytest.raises(IllegalTransitionError, match="bucket 1 can't become done: it is ready, not launched"):
        order.mark_done(1)
