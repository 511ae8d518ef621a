"""Bucket plans: every element in one slot, caps, purity, order, digests, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_rt.bucket import Bucket, BucketPlan, ParameterSpec, is_dense, plan_buckets, plan_digest
from bagua_rt.errors import UsageError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
few_examples = settings(max_examples=60, deadline=None)


@st.composite
def some_specs(draw: st.DrawFn, devices: Sequence[str] = ("cpu", "cuda:0")) -> list[ParameterSpec]:
    specs = []
    for i in range(draw(st.integers(0, 12))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        tensor = torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)))
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        spec = ParameterSpec.of(f"p{i}", tensor)
        specs.append(replace(spec, device=draw(st.sampled_from(devices))))
    return specs


caps = st.integers(1, 3000)


def plan(specs: Sequence[ParameterSpec], cap: int, first: int, alignment: int = 1) -> tuple[BucketPlan, ...]:
    return plan_buckets(specs, cap_bytes=cap, first_cap_bytes=first, alignment=alignment, lanes=2)


@few_examples
@given(some_specs(), caps, caps, st.sampled_from([1, 8, 24]))
def test_every_parameter_is_in_one_slot_and_slots_fill_the_bucket(
    specs: list[ParameterSpec], cap: int, first: int, alignment: int
) -> None:
    plans = plan(specs, cap, first, alignment)
    assert sorted(name for each in plans for name in each.names) == sorted(spec.name for spec in specs)
    for index, each in enumerate(plans):
        assert (each.index, each.lane) == (index, index % 2)
        taken = [i for slot in each.slots for i in range(slot.offset, slot.offset + slot.spec.numel)]
        assert taken == list(range(each.numel)), "no gap, no overlap"
        assert each.padded_numel % alignment == 0
        assert 0 <= each.padded_numel - each.numel < alignment
        assert {(slot.spec.dtype, slot.spec.device) for slot in each.slots} == {(each.dtype, each.device)}


@few_examples
@given(some_specs(), caps, caps)
def test_caps_hold_but_for_a_giant_alone(specs: list[ParameterSpec], cap: int, first: int) -> None:
    plans = plan(specs, cap, first)
    for each in plans:
        assert each.nbytes <= cap or len(each.slots) == 1
    for each in plans:
        rest = [spec for spec in specs if (spec.dtype, str(spec.device)) == (each.dtype, each.device)]
        if sum(spec.nbytes for spec in rest) <= min(cap, first):
            assert len(each.slots) == len(rest), "what fits into one bucket is not split"


@few_examples
@given(some_specs(), caps, caps)
def test_buckets_launch_in_the_order_in_which_they_can_be_full(
    specs: list[ParameterSpec], cap: int, first: int
) -> None:
    position = {spec.name: i for i, spec in enumerate(specs)}
    plans = plan(specs, cap, first)
    last = [max(position[name] for name in each.names) for each in plans]
    assert last == sorted(last)
    for each in plans:
        inside = [position[name] for name in each.names]
        assert inside == sorted(inside), "within a bucket too"
    for one, other in pairwise(plans):
        if (one.dtype, one.device) == (other.dtype, other.device):
            assert max(position[n] for n in one.names) < min(position[n] for n in other.names)


@few_examples
@given(some_specs(), caps, caps, st.data())
def test_equal_digests_mean_equal_plans(
    specs: list[ParameterSpec], cap: int, first: int, data: st.DataObject
) -> None:
    plans = plan(specs, cap, first)
    assert plan_digest(plans) == plan_digest(plan(list(specs), cap, first))
    assert len(plan_digest(plans)) == 8
    assert plan_digest(plans) != plan_digest(plans, extra="setting")
    if not specs:
        return
    i = data.draw(st.integers(0, len(specs) - 1))
    changes = {
        "name": replace(specs[i], name="another"),
        "shape": replace(specs[i], shape=(*specs[i].shape, 2), stride=(*specs[i].stride, 1)),
        "dtype": replace(specs[i], dtype=torch.complex64),
        "device": replace(specs[i], device="cuda:7"),
    }
    for what, spec in changes.items():
        other = plan([*specs[:i], spec, *specs[i + 1 :]], cap, first)
        assert plan_digest(other) != plan_digest(plans), what
    reordered = plan(list(reversed(specs)), cap, first)
    assert (plan_digest(reordered) == plan_digest(plans)) == (reordered == plans)


@few_examples
@given(some_specs(devices=("cpu",)), caps, st.sampled_from([1, 16]))
def test_views_have_the_parameters_layout_and_share_the_flat_buffer(
    specs: list[ParameterSpec], cap: int, alignment: int
) -> None:
    for each in plan(specs, cap, cap, alignment):
        tensors = [torch.empty(slot.spec.shape) for slot in each.slots]
        bucket = Bucket(each, tensors)
        assert bucket.flat.shape == (each.padded_numel,)
        assert not bucket.flat.any()
        for number, (slot, view) in enumerate(zip(each.slots, bucket.views, strict=True), start=1):
            assert (tuple(view.shape), tuple(view.stride())) == (slot.spec.shape, slot.spec.stride)
            view.fill_(number)
            assert bucket.holds(view) == (bucket.flat.numel() > 0)
            assert not bucket.holds(torch.zeros(3))
        right = [n for n, slot in enumerate(each.slots, start=1) for _ in range(slot.spec.numel)]
        padding = [0] * (each.padded_numel - each.numel)
        assert bucket.flat.tolist() == [*right, *padding]


def test_first_bucket_is_small_and_a_giant_does_not_hold_up_what_came_before() -> None:
    sizes = [10, 10, 3_000_000, 10]
    specs = [ParameterSpec.of(f"p{i}", torch.empty(size)) for i, size in enumerate(sizes)]
    plans = plan(specs, 1 << 20, 48)
    assert [each.names for each in plans] == [("p0",), ("p1",), ("p2",), ("p3",)]
    assert [each.nbytes for each in plan(specs, 1 << 20, 1 << 20)] == [80, 12_000_000, 40]


@pytest.mark.parametrize(
    ("sizes", "planned"),
    [
        ([5, 50, 20, 20], [[5], [50, 20, 20]]),
        ([5, 4, 80, 10, 10, 1], [[5, 4], [80, 10, 10], [1]]),
        ([50, 20], [[50], [20]]),  # the first one, early and alone
    ],
)
def test_the_first_cap_is_the_first_buckets_alone(sizes: list[int], planned: list[list[int]]) -> None:
    specs = [ParameterSpec.of(f"p{i}", torch.empty(size)) for i, size in enumerate(sizes)]
    plans = plan_buckets(specs, cap_bytes=400, first_cap_bytes=40)
    assert [[slot.spec.numel for slot in plan.slots] for plan in plans] == planned


def test_5000_parameters_are_planned_in_linear_time() -> None:
    specs = [ParameterSpec(f"p{i}", (1,), (1,), torch.float32, "cpu") for i in range(5000)]
    calls = 0
    original = math.prod

    def counted(values: Sequence[int]) -> int:
        nonlocal calls
        calls += 1
        return original(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bagua_rt.bucket.math.prod", counted)
        plans = plan(specs, 10 << 20, 1 << 20)
    assert [len(each.slots) for each in plans] == [5000]
    assert calls < 10 * 5000


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(3), torch.ones(2, 1).expand(2, 5), torch.ones(9).as_strided((3, 3), (2, 2))],
)
def test_overlapping_elements_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"the parameter 'w' is expanded.*strides.*\.clone\(\)"):
        ParameterSpec.of("w", tensor)


@pytest.mark.parametrize(
    ("tensor", "is_right"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(2, 3, 4).permute(2, 0, 1), True),
        (torch.ones(4, 4, 1, 1).to(memory_format=torch.channels_last), True),
        (torch.ones(()), True),
        (torch.ones(0, 4), True),
        (torch.ones(4)[::2], False),
        (torch.ones(3, 2)[:, :1], False),
    ],
)
def test_dense_layouts_are_kept_and_others_become_contiguous(tensor: torch.Tensor, is_right: bool) -> None:
    assert is_dense(tensor.shape, tensor.stride()) is is_right
    stride = ParameterSpec.of("w", tensor).stride
    assert stride == (tensor.stride() if is_right else tensor.contiguous().stride())
