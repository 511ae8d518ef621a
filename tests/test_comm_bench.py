"""tools/comm_bench.py, small: every collective is measured and checked, and what is wrong is counted."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import bagua_rt as bagua
from tests.emulator import product
from tests.micro import group, on
from tests.ranks import RankContext, RankPool
from tools import comm_bench, comm_bench_host

SMALL = ["-b", "64", "-e", "4K", "-f", "8", "-n", "2", "-w", "1"]
PRIMITIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "exchange")


def run(ctx: RankContext, arguments: list[str], wrong_on: int | None = None) -> int:
    """The exit code; one rank's backend may write a wrong last element into every output."""
    options = comm_bench.parse_options([*SMALL, *arguments])
    with group(ctx) as pg:
        if ctx.rank != wrong_on:
            return comm_bench.bench(pg, options)
        from bagua_rt.backends.gloo import GlooCommunicator

        with mock.patch.multiple(GlooCommunicator, **{f"_{name}": wrong(name) for name in PRIMITIVES}):
            return comm_bench.bench(pg, options)


def wrong(name: str) -> Any:
    from bagua_rt.backends.gloo import GlooCommunicator

    right = getattr(GlooCommunicator, f"_{name}")

    def primitive(self: GlooCommunicator, via: Any, *args: Any) -> None:
        right(self, via, *args)
        if name != "exchange":
            outputs = [args[0]]
        else:
            _, receives, copies = args
            outputs = [t for _, t in receives] + [t for t, _ in copies]
        for out in outputs[:1]:
            out.view(-1)[-1] += 1

    return primitive


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, []), (3, ["--op", "avg"]), (2, ["--dtype", "int32", "--op", "max"])]
)
def test_every_collective_is_right(
    pool: RankPool, tmp_path: Path, world_size: int, options: list[str]
) -> None:
    path = tmp_path / "found.json"
    assert on(pool, world_size, run, [*options, "--json", str(path)]) == [0] * world_size
    found = json.loads(path.read_text())
    assert (found["ranks"], found["device"], found["wrong"]) == (world_size, "cpu", 0)
    assert [row["collective"] for row in found["rows"]] == [
        n for n in comm_bench.COLLECTIVES for _ in range(3)
    ]
    factors = {"all_reduce": 2 * (world_size - 1) / world_size, "reduce": 1, "broadcast": 1, "send_recv": 1}
    op = options[options.index("--op") + 1] if options else "sum"
    for row in found["rows"]:
        assert row["count"] % world_size == 0
        assert row["op"] == (op if "reduce" in row["collective"] else "none")
        forms = [form for form in (row["out_of_place"], row["in_place"]) if form]
        assert len(forms) == (2 if row["collective"] in ("all_reduce", "all_gather", "reduce_scatter") else 1)
        for form in forms:
            assert form["algbw_gbs"] == pytest.approx(row["size_bytes"] / form["time_us"] / 1e3)
            factor = factors.get(row["collective"], (world_size - 1) / world_size)
            assert form["busbw_gbs"] == pytest.approx(factor * form["algbw_gbs"])


def test_wrong_values_are_counted_and_are_the_exit_code(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert on(pool, 2, run, ["-r", "1", "--json", str(path)], 1) == [1, 1]
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3 * len(comm_bench.COLLECTIVES)
    for row in rows:
        forms = [form["wrong"] for form in (row["out_of_place"], row["in_place"]) if form]
        assert forms == [1] * len(forms), row  # the last element of rank 1's output, and no other
    assert on(pool, 2, run, ["--no-check", "--json", str(path)], 1) == [0, 0]
    assert json.loads(path.read_text())["rows"][0]["in_place"]["wrong"] is None


@pytest.mark.parametrize(
    ("collective", "world_size", "bus"),
    [
        *(("all_reduce", n, bus) for n, bus in ((1, 0.0), (2, 33.554432), (4, 50.331648))),
        *((name, 2, 16.777216) for name in ("all_gather", "reduce_scatter")),
        *((name, 4, 25.165824) for name in ("all_gather", "reduce_scatter")),
        *(("broadcast", n, 33.554432) for n in (2, 4)),
    ],
)
@pytest.mark.parametrize("is_in_place", [False, True])
def test_b70_bandwidths_of_32_mib_in_a_millisecond(
    collective: str, world_size: int, bus: float, is_in_place: bool
) -> None:
    what = comm_bench.COLLECTIVES[collective]
    launch = what.in_place if is_in_place else what.out_of_place
    said: dict[str, str] = {
        f"key/{rank}": json.dumps([1000.0 + offset, rank])  # microseconds, and wrong values
        for rank, offset in enumerate([0.0] if world_size == 1 else [-500.0, 500.0] * (world_size // 2))
    }
    store = SimpleNamespace(set=lambda *_: None, get=said.__getitem__)
    group_of = SimpleNamespace(rank=0, world_size=world_size, store=store)
    setting = comm_bench.Setting(mock.Mock(), torch.device("cpu"), torch.float32, "sum", 8 << 20, 0)
    with mock.patch.object(comm_bench, "measure", return_value=(1000.0, 0)):
        options = comm_bench.parse_options(SMALL)
        found = comm_bench.figures(group_of, setting, what, launch, options, "key")  # type: ignore[arg-type]
    if launch is None:
        assert found is None
        return
    assert found is not None
    assert found.time_us == 1000.0
    assert found.algbw_gbs == pytest.approx(33.554432)  # GB = 1e9 bytes
    assert found.busbw_gbs == pytest.approx(bus)
    assert found.wrong == sum(range(world_size))


def test_an_average_may_be_rounded_and_no_more() -> None:
    right = torch.full((10,), 1 / 3)
    assert comm_bench.count_wrong(right * (1 + 1e-7), right, "avg") == 0
    assert comm_bench.count_wrong(right * (1 + 1e-5), right, "avg") == 10
    assert comm_bench.count_wrong(right * (1 + 1e-5), right, "sum") == 10


def as_a_command(ctx: RankContext, path: str) -> int:
    with mock.patch.object(sys, "argv", ["comm_bench.py", "--ranks", "1", *SMALL, "--json", path]):
        return comm_bench.main()


def test_one_rank_needs_no_launcher(pool: RankPool, tmp_path: Path) -> None:
    assert on(pool, 1, as_a_command, str(tmp_path / "found.json")) == [0]
    assert json.loads((tmp_path / "found.json").read_text())["ranks"] == 1


@pytest.mark.parametrize(
    "arguments", [["--op", "avg", "--dtype", "int8"], ["-f", "1"], ["--collectives", "no"]]
)
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        comm_bench.parse_options(arguments)
    text = capsys.readouterr().err
    assert "average" in text or "--factor" in text or "--collectives" in text


# ---- host


def host(ctx: RankContext, path: str) -> list[comm_bench_host.Cost]:
    from bagua_rt.backends import cuda

    few: dict[str, Any] = {"CALLS": 3, "ROUNDS": 2, "STEPS": 4, "BUCKETS": 3}
    with (
        mock.patch.multiple(comm_bench_host, **few),
        mock.patch.object(cuda, "CudaTorch", comm_bench_host.HostTorch),
    ):
        options: dict[str, Any] = {"store": ctx.store(), "rank": ctx.rank, "world_size": 2, "timeout_s": 60}
        with bagua.init(f"cuda:{ctx.rank}", **options) as pg:
            found = comm_bench_host.measure(pg)
    if ctx.rank == 0:
        comm_bench_host.tell(found, Path(path))
    return found


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    return product.environment(base={}, noop=True)


def test_host_costs(environment: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    first, second = RankPool(2, environment).run(host, str(path), timeout=100)
    assert [each.name for each in first[-5:]] == [each.name for each in second]
    assert all(math.isfinite(each.us) for each in first)
    assert all(each.us > 0 for each in first[:-5])
    assert {each.bar_us for each in first} == {None, 1.0, 3.0, 60.0, 300.0, 3000.0}
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == [each.name for each in first]
