#!/usr/bin/env python3
"""Measure and check every collective of the low-level communication API, in the manner of nccl-tests.

A row is one collective at one size, out of place and in place: the time of a call, averaged over the ranks;
the algorithm's bandwidth, size by time; the bus bandwidth, what a link carries, by nccl-tests' factors, which
can be compared between collectives and numbers of ranks; and the wrong values in the outputs of all ranks. If
there are any, the exit code is 1.

    python tools/comm_bench.py                                       two ranks of this machine, over gloo
    python tools/comm_bench.py --ranks 3 -b 1K -e 64M --collectives all_reduce reduce_scatter --op max
    torchrun --nproc-per-node 8 tools/comm_bench.py --device cuda    is one of the ranks; so under srun
    python tools/comm_bench.py --host                                what calls cost the host, over libraries
                                                        that do nothing: tests/emulator's, or --libraries
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import bagua_rt as bagua
from bagua_rt.backend import Communicator, Work

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
OPS = ("sum", "avg", "max", "min", "prod")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
POISON = 99  # what outputs hold before

# ---- what goes in and what must come out


@dataclass(frozen=True)
class Setting:
    """What a measurement is made of.

    Attributes:
        comm: The ranks.
        device: Where the tensors are.
        dtype: Of the tensors.
        op: Of reductions.
        count: Elements of the whole tensor; a multiple of the number of ranks.
        root: For the collectives that have one.
    """

    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    op: Any
    count: int
    root: int = 0

    @property
    def part(self) -> int:
        """Elements of one rank's part."""
        return self.count // self.comm.world_size

    @property
    def mine(self) -> slice:
        """This rank's part."""
        return slice(self.comm.rank * self.part, (self.comm.rank + 1) * self.part)

    def neighbour(self, distance: int) -> int:
        """The rank at this distance on the ring."""
        return (self.comm.rank + distance) % self.comm.world_size

    def split(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' parts of a whole tensor."""
        return [t[k * self.part : (k + 1) * self.part] for k in range(self.comm.world_size)]

    def empty(self, count: int) -> torch.Tensor:
        """Memory for an input or an output."""
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def values(self, rank: int, count: int) -> torch.Tensor:
        """The input of `rank`: small whole numbers, so that reductions are exact in every dtype."""
        period = 2 if self.op == "prod" else 7
        return ((torch.arange(count) * 3 + rank * 5) % period + 1).to(self.dtype)


def reduced(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """What the ranks' inputs reduce to, by torch."""
    if op == "avg":
        return torch.stack([t.double() for t in inputs]).mean(0).to(inputs[0].dtype)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "prod": torch.mul,
    }
    total = inputs[0]
    for t in inputs[1:]:
        total = functions[op](total, t)
    return total


def count_wrong(found: torch.Tensor, expected: torch.Tensor, op: str) -> int:
    """How many elements are wrong; an average, scaled before it is summed, may be off by rounding."""
    found = found.cpu()
    if op == "avg":
        room = 4 * torch.finfo(found.dtype).eps
        return int((~torch.isclose(found, expected, rtol=room, atol=0)).sum())
    return int((found != expected).sum())


Expected = Callable[[Setting, list[torch.Tensor]], "torch.Tensor | None"]
Launch = Callable[[Setting, torch.Tensor, torch.Tensor], Work]


@dataclass(frozen=True)
class Collective:
    """How to call a collective, and what it does.

    Attributes:
        factor: Bus bandwidth by algorithm bandwidth, for so many ranks.
        expected: This rank's output, given every rank's input; None where the collective writes none.
        out_of_place: Launches it: setting, output, input. None where there is no such call.
        in_place: The same where the smaller of the two is part of the larger, or both are one.
        takes_part: Is the input one rank's part? Else it is whole.
        gives_part: Is the output one rank's part?
        reduces: Does it take an operator?
    """

    factor: Callable[[int], float]
    expected: Expected
    out_of_place: Launch | None = None
    in_place: Launch | None = None
    takes_part: bool = False
    gives_part: bool = False
    reduces: bool = False


def others(n: int) -> float:
    """The share of the ranks that are others."""
    return (n - 1) / n


COLLECTIVES = {
    "all_reduce": Collective(
        lambda n: 2 * others(n),
        lambda s, inputs: reduced(inputs, s.op),
        lambda s, out, inp: s.comm.all_reduce(out, inp, s.op),
        lambda s, out, _: s.comm.all_reduce_(out, s.op),
        reduces=True,
    ),
    "reduce": Collective(
        lambda _: 1.0,
        lambda s, inputs: reduced(inputs, s.op) if s.comm.rank == s.root else inputs[s.comm.rank],
        in_place=lambda s, out, _: s.comm.reduce_(out, s.root, s.op),
        reduces=True,
    ),
    "broadcast": Collective(
        lambda _: 1.0,
        lambda s, inputs: inputs[s.root],
        in_place=lambda s, out, _: s.comm.broadcast_(out, s.root),
    ),
    "all_gather": Collective(
        others,
        lambda _, inputs: torch.cat(inputs),
        lambda s, out, inp: s.comm.all_gather(out, inp),
        lambda s, out, inp: s.comm.all_gather(out, inp),
        takes_part=True,
    ),
    "reduce_scatter": Collective(
        others,
        lambda s, inputs: reduced(inputs, s.op)[s.mine],
        lambda s, out, inp: s.comm.reduce_scatter(out, inp, s.op),
        lambda s, out, inp: s.comm.reduce_scatter(out, inp, s.op),
        gives_part=True,
        reduces=True,
    ),
    "all_to_all": Collective(
        others,
        lambda s, inputs: torch.cat([t[s.mine] for t in inputs]),
        lambda s, out, inp: s.comm.all_to_all(out, inp),
    ),
    "all_to_all_v": Collective(
        others,
        lambda s, inputs: torch.cat([t[s.mine] for t in inputs]),
        lambda s, out, inp: s.comm.all_to_all_v(s.split(out), s.split(inp)),
    ),
    "gather": Collective(
        others,
        lambda s, inputs: torch.cat(inputs) if s.comm.rank == s.root else None,
        lambda s, out, inp: s.comm.gather(s.split(out) if s.comm.rank == s.root else None, inp, s.root),
        takes_part=True,
    ),
    "scatter": Collective(
        others,
        lambda s, inputs: inputs[s.root][s.mine],
        lambda s, out, inp: s.comm.scatter(out, s.split(inp) if s.comm.rank == s.root else None, s.root),
        gives_part=True,
    ),
    "send_recv": Collective(
        lambda _: 1.0,
        lambda s, inputs: inputs[s.neighbour(-1)],
        lambda s, out, inp: s.comm.send_recv(inp, s.neighbour(1), out, s.neighbour(-1)),
    ),
}

# ---- measuring


@dataclass(frozen=True)
class Figures:
    """One form of a row: times in microseconds, bandwidths in GB/s; `wrong` is None if it wasn't checked."""

    time_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int | None


@dataclass(frozen=True)
class Row:
    """One collective at one size."""

    collective: str
    size_bytes: int
    count: int
    dtype: str
    op: str
    out_of_place: Figures | None
    in_place: Figures | None

    @property
    def wrong(self) -> int:
        """Wrong values in all outputs."""
        forms = (self.out_of_place, self.in_place)
        return sum(form.wrong or 0 for form in forms if form is not None)


def measure(s: Setting, what: Collective, launch: Launch, options: argparse.Namespace) -> tuple[float, int]:
    """The time of a call in microseconds, and how many values of this rank's output are wrong. Collective."""
    whole, is_in_place = s.empty(s.count), launch is what.in_place
    inp = whole[s.mine] if what.takes_part else whole
    out = whole if is_in_place else s.empty(s.count)
    if what.gives_part:
        out = out[s.mine]
    for _ in range(options.warmup):
        launch(s, out, inp).wait()
    s.comm.barrier().wait()
    begin = time.perf_counter()
    works = [launch(s, out, inp) for _ in range(options.iters)]
    works[-1].wait()  # one lane: it comes last
    time_us = (time.perf_counter() - begin) / options.iters * 1e6
    if not options.check:
        return time_us, 0
    out.fill_(POISON)
    inp.copy_(s.values(s.comm.rank, inp.numel()))
    launch(s, out, inp).wait()
    expected = what.expected(s, [s.values(rank, inp.numel()) for rank in range(s.comm.world_size)])
    return time_us, 0 if expected is None else count_wrong(out, expected, s.op)


def figures(
    pg: bagua.ProcessGroup,
    s: Setting,
    what: Collective,
    launch: Launch | None,
    options: argparse.Namespace,
    key: str,
) -> Figures | None:
    """One form of a row, from all ranks' measurements, which meet under `key`. Collective."""
    if launch is None:
        return None
    mine = measure(s, what, launch, options)
    # Not by a collective: that may be what is wrong.
    pg.store.set(f"{key}/{pg.rank}", json.dumps(mine))
    everyone = [json.loads(pg.store.get(f"{key}/{rank}")) for rank in range(pg.world_size)]
    time_us = sum(each[0] for each in everyone) / pg.world_size
    algbw = s.count * s.dtype.itemsize / time_us / 1e3
    wrong = sum(each[1] for each in everyone) if options.check else None
    return Figures(time_us, algbw, algbw * what.factor(pg.world_size), wrong)


def sweep(pg: bagua.ProcessGroup, options: argparse.Namespace) -> list[Row]:
    """Every row that was asked for. Collective."""
    rows = []
    dtype: torch.dtype = getattr(torch, options.dtype)
    for name in options.collectives:
        what = COLLECTIVES[name]
        size = options.min_bytes
        while size <= options.max_bytes:
            count = max(1, size // dtype.itemsize // pg.world_size) * pg.world_size
            s = Setting(pg.world, pg.device, dtype, options.op, count, options.root)
            out, inside = (
                figures(pg, s, what, launch, options, f"comm_bench/{name}/{size}/{form}")
                for form, launch in (("out", what.out_of_place), ("in", what.in_place))
            )
            op = options.op if what.reduces else "none"
            rows.append(Row(name, count * dtype.itemsize, count, options.dtype, op, out, inside))
            size *= options.factor
    return rows


# ---- telling


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as nccl-tests prints them."""
    table = Table(box=box.SIMPLE_HEAD, caption="bandwidths in GB/s")
    table.add_column("collective", vertical="bottom")
    forms = [f"{form}\n{what}" for form in ("out", "in") for what in ("us", "algbw", "busbw", "wrong")]
    for column in ("bytes", "count", "type", "op", *forms):
        table.add_column(column, justify="right", vertical="bottom")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        cells = [row.collective, f"{row.size_bytes:,}", f"{row.count:,}", row.dtype, row.op]
        for form in (row.out_of_place, row.in_place):
            cells += _cells(form)
        is_last = after is None or after.collective != row.collective
        table.add_row(*cells, style="bold red" if row.wrong else None, end_section=is_last)
    return table


def _cells(form: Figures | None) -> list[str]:
    if form is None:
        return [""] * 4
    wrong = "not checked" if form.wrong is None else f"{form.wrong:,}"
    return [f"{form.time_us:.1f}", f"{form.algbw_gbs:.3f}", f"{form.busbw_gbs:.3f}", wrong]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks to start on this machine, where no launcher has (2)")
    add("--device", default="cpu", help='"cpu" for gloo, "cuda" for NCCL (cpu)')
    add("-b", "--min-bytes", type=_size, default=_size("1K"), help="the smallest size, as 8, 1K, 2M (1K)")
    add("-e", "--max-bytes", type=_size, default=_size("16M"), help="the largest size (16M)")
    add("-f", "--factor", type=int, default=4, help="from one size to the next (4)")
    add("-n", "--iters", type=int, default=20, help="calls that are timed (20)")
    add("-w", "--warmup", type=int, default=3, help="calls before them (3)")
    add("-r", "--root", type=int, default=0, help="for the collectives that have one (0)")
    add("--dtype", choices=DTYPES, default="float32", help="(float32)")
    add("--op", choices=OPS, default="sum", help="of reductions (sum)")
    names = list(COLLECTIVES)
    some = f"some of {', '.join(names)} (all)"
    add("--collectives", nargs="+", choices=names, default=names, metavar="NAME", help=some)
    add("--no-check", dest="check", action="store_false", help="don't look for wrong values")
    add("--timeout-s", type=float, default=120.0, help="the deadline of every wait (120)")
    add("--json", type=Path, metavar="PATH", help="write the figures there too")
    add("--host", action="store_true", help="what calls cost the host instead; the other options don't apply")
    add("--libraries", type=Path, metavar="FOLDER", help="for --host: a libcuda.so.1 and a libnccl.so.2")
    options = parser.parse_args(arguments)
    if min(options.ranks, options.factor - 1, options.iters, options.min_bytes) < 1 or options.warmup < 0:
        parser.error("--ranks, --iters and --min-bytes are 1 or more, --factor is 2 or more")
    if not 0 < options.min_bytes <= options.max_bytes or options.factor < 2:
        parser.error("--min-bytes is above 0 and no more than --max-bytes, and --factor is 2 or more")
    if options.op == "avg" and not getattr(torch, options.dtype).is_floating_point:
        parser.error("whole numbers have no average")
    return options


def _size(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    try:
        return int(text.rstrip("KkMmGg")) * unit
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 8, 1K or 2M are") from error


def bench(pg: bagua.ProcessGroup, options: argparse.Namespace) -> int:
    """Measure, and tell on rank 0. Collective.

    Returns:
        The exit code.
    """
    rows = sweep(pg, options)
    wrong = sum(row.wrong for row in rows)
    if pg.rank == 0:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table_of(rows))
        backend = "NCCL" if pg.device.type == "cuda" else "gloo"
        console.print(f"{pg.world_size} ranks over {backend}; {wrong:,} wrong values in all")
        if options.json:
            about = {"ranks": pg.world_size, "device": pg.device.type, "torch": torch.__version__}
            found = {**about, "wrong": wrong, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


def main() -> int:
    """Be one rank, or start all of them; or measure what calls cost the host."""
    options = parse_options()
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    if options.host:
        from tools import comm_bench_host

        return comm_bench_host.main(options.libraries, options.json)
    from launching import start_ranks

    start_ranks(options.ranks)
    try:
        with bagua.init(options.device, timeout_s=options.timeout_s) as pg:
            return bench(pg, options)
    except bagua.errors.UsageError as error:  # what was asked for can't be, and was not begun
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
