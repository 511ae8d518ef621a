"""The first thing a stranger runs: examples/train_gpt.py, as `make train` starts it, with a tiny model."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt
from gpt import GPT, Corpus, Shape, batches
from tests.ranks import launched, run_scripts

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt.py"
AS_MAIN = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI",
)

pytestmark = pytest.mark.timeout(300)  # seconds each; on a busy machine they take many times that


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    env["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )


def train(*options: str) -> str:
    done = start(SCRIPT, "--size", "tiny", "--device", "cpu", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_as_ranks(
    port: int, ranks: int, *options: str, program: str = AS_MAIN
) -> tuple[list[int | None], str]:
    """Run the script as the ranks that a launcher would start. Returns: exit codes, and rank 0's output."""
    arguments = ["--size", "tiny", "--device", "cpu", *options]
    done = run_scripts([program] * ranks, env=launched(port, ranks), args=arguments, timeout=200.0)
    return [each.exit_code for each in done], done[0].stdout + "".join(each.stderr for each in done)


def number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, f"nothing like {pattern!r} in:\n{text}"
    return float(match.group(1))


def test_default_run_learns_and_shows_all_it_promises(tmp_path: Path) -> None:
    shown = train("--ranks", "2", "--steps", "60", "--trace", str(tmp_path / "trace"))
    bits = number(r"validation: ([\d.]+) bits per byte", shown)
    assert bits < 5.0  # 8 untrained; knowing how frequent each byte is gives 4.8
    assert "bit-equal on 2 rank(s)" in shown
    assert "sample:\nclass " in shown
    assert 0.1 < number(r"step time: .* torch DDP .* ratios ([\d.]+)", shown) < 10
    assert number(r"wire +([\d.]+) MB/s", shown) > 0
    assert 0 <= number(r"hidden +(\d+)%", shown) <= 100
    traces = sorted((tmp_path / "trace").iterdir())
    assert len(traces) == 2
    assert all(json.loads(path.read_text())["traceEvents"] for path in traces)


def test_loss_shown_is_the_mean_of_what_the_ranks_see(port: int) -> None:
    torch.manual_seed(3)
    shape = train_gpt.SHAPES["tiny"]
    text = Corpus.from_standard_library(train_gpt.CORPUS_BYTES).train
    model = GPT(shape)
    firsts = [next(batches(text, shape.context, 2, seed=3, rank=rank)) for rank in (0, 1)]
    losses = [model(*first).item() for first in firsts]
    options = ("--steps", "1", "--batch-size", "2", "--seed", "3", "--no-compare-ddp")
    codes, shown = train_as_ranks(port, 2, *options)
    assert codes == [0, 0], shown
    assert number(r"loss ([\d.]+)", shown) == pytest.approx(sum(losses) / 2 / math.log(2), abs=6e-4)
    assert abs(losses[0] - losses[1]) > 2e-3  # else this would show nothing
    assert "torch DDP" not in shown


@pytest.mark.parametrize(("algorithm", "ranks"), [("onebit_adam", 3), ("decentralized", 2)])
def test_algorithms(port: int, algorithm: str, ranks: int) -> None:
    codes, shown = train_as_ranks(port, ranks, "--algorithm", algorithm, "--steps", "40", "--no-compare-ddp")
    assert codes == [0] * ranks, shown
    assert f"{algorithm}, {ranks} rank(s)" in shown
    assert number(r"validation: ([\d.]+) bits per byte", shown) < 6.0
    if algorithm == "decentralized":
        assert 0 < number(r"not bit-equal, .* at most ([\d.e-]+)", shown) < 0.1
    else:
        assert f"bit-equal on {ranks} rank(s)" in shown


def test_one_rank_needs_no_launcher() -> None:
    options = ("--size", "tiny", "--device", "cpu", "--ranks", "1", "--steps", "3")
    (done,) = run_scripts([AS_MAIN], args=options, timeout=200.0)
    assert done.exit_code == 0, done.stderr
    shown = done.stdout
    assert "bit-equal on 1 rank(s)" in shown
    assert "torch DDP" not in shown


def test_under_torchrun_it_is_one_of_the_ranks() -> None:
    done = start(*TORCHRUN, "2", SCRIPT, "--size", "tiny", "--steps", "3", "--no-compare-ddp", "--ranks", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bit-equal on 2 rank(s)") == 1


SPOILED = """
import os, sys, train_gpt
train = train_gpt.train
def spoiled(options, model, *rest):
    train(options, model, *rest)
    model.norm.bias.data[3] += 2.0 ** -20 * (os.environ["RANK"] == "1")
train_gpt.train = spoiled
sys.exit(train_gpt.main())
"""


def test_unequal_replicas_fail_the_run(port: int) -> None:
    codes, shown = train_as_ranks(port, 2, "--steps", "2", "--no-compare-ddp", program=SPOILED)
    assert codes == [1, 1]
    assert "NOT bit-equal: 2 different ones, a weight differs between ranks by at most 9.5e-07" in shown


@pytest.mark.parametrize("wrong", ["--ranks 0", "--steps many", "--algorithm none", "--size huge"])
def test_wrong_options_are_refused_by_name(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *wrong.split()])
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main()
    shown = capsys.readouterr().err
    assert f"argument {wrong.split(maxsplit=1)[0]}" in shown
    assert wrong.split()[1] in shown


def test_help_is_complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        train_gpt.main()
    shown = capsys.readouterr().out
    options = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    assert len(options) >= 12
    for option in options:
        (text,) = re.findall(rf"^  {option}\b(.*?)(?=^  --|\n\n)", shown, re.MULTILINE | re.DOTALL)
        assert option == "--trace" or "(default:" in text, f"{option} has no default in --help"


def test_corpus_is_the_same_for_everyone_and_holds_files_out() -> None:
    first, second = Corpus.from_standard_library(2_000_000), Corpus.from_standard_library(2_000_000)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    total = len(first.train) + len(first.validation)
    assert 1_900_000 < total < 2_010_000
    assert 0.01 < len(first.validation) / total < 0.2
    assert bytes(first.validation[:200].tolist()) not in bytes(first.train.tolist())


def test_ranks_draw_their_own_batches() -> None:
    text = torch.arange(10_000).remainder(251).to(torch.uint8)
    (tokens, targets), (others, _) = (next(batches(text, 16, 4, seed=0, rank=rank)) for rank in (0, 1))
    again, _ = next(batches(text, 16, 4, seed=0, rank=0))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, others)


def test_model_sees_no_byte_before_its_time() -> None:
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=32, heads=2, context=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] ^= 1
    differs = (model.logits(tokens) != model.logits(changed)).any(-1)[0]
    assert not differs[:10].any()
    assert differs[10:].all()
