"""The project itself: layers, rules of the tree, version and changelog, the wheel outside the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bagua_rt

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "MASTER_", "LOCAL_", "COVERAGE")
LONELY = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{command} failed in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_imports_go_only_downward() -> None:
    # In a process of its own: it silences every logger there is.
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    run(sys.executable, "-c", program, cwd=ROOT, env={**LONELY, "PYTHONPATH": "src"})


def test_version_and_changelog_agree() -> None:
    newest = re.search(r"^## \[([^\]]+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no entry of the form '## [1.2.3] - date'"
    assert newest.group(1) == bagua_rt.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", newest.group(2))


def test_every_public_name_exists() -> None:
    assert bagua_rt.__all__ == sorted(set(bagua_rt.__all__), key=bagua_rt.__all__.index)
    for name in bagua_rt.__all__:
        assert hasattr(bagua_rt, name), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_rules_that_no_linter_knows(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500, "a file has 500 lines at most"
    assert path.stem not in {"utils", "util", "helpers", "types", "constants", "common", "misc"}
    for node in ast.walk(ast.parse(text)):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 50, f"{where}: {node.name} has {lines} lines, 50 at most"
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            raised = ast.unparse(node.exc.func)
            assert raised not in {"RuntimeError", "Exception", "AssertionError"}, (
                f"{where} raises a bare {raised}"
            )
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}:
            assert path.name == "config.py", f"{where}: only config.py reads the environment"


def test_documents_link_to_what_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_code_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        env = {**LONELY, "PYTHONPATH": str(ROOT / "src")}
        run(sys.executable, "-c", block, cwd=tmp_path, env=env)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Built by the tools that are installed: the suite needs no package index.
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "bagua_rt",
        f"bagua_rt-{bagua_rt.__version__}.dist-info",
    }
    assert "bagua_rt/py.typed" in names
    for path in SOURCES:
        assert path.relative_to(ROOT / "src").as_posix() in names
    for kernel in (path for path in (ROOT / "kernels").rglob("*") if path.is_file()):
        assert f"bagua_rt/kernels/{kernel.relative_to(ROOT / 'kernels').as_posix()}" in names


def test_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    )
    run(*pip, str(wheel), cwd=elsewhere)
    script = (
        "import torch, bagua_rt as bagua; print(bagua.__file__)\n"
        "model = torch.nn.Linear(3, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"
        "before = model.bias.item()\n"
        "with bagua.init('cpu') as pg:\n"
        "    attached = bagua.attach(model, optimizer)\n"
        "    model(torch.ones(2, 3)).sum().backward(); optimizer.step(); attached.close()\n"
        "assert abs(model.bias.item() - (before - 0.5 * 2)) < 1e-6\n"
    )
    printed = run(sys.executable, "-c", script, cwd=elsewhere, env={**LONELY, "PYTHONPATH": str(site)})
    assert printed.startswith(str(site)), printed
