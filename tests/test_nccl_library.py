"""Finding and loading libnccl (cases B60 and B61): each search runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import bagua_rt
from bagua_rt.backends._nccl_library import version_text
from tests import fake_nccl

# The child loads the search alone: without bagua_rt's own __init__, and so torch, it starts ten times faster.
_CHILD = """
import ctypes, json, sys, types
for name, path in (("bagua_rt", sys.argv[1]), ("bagua_rt.backends", sys.argv[1] + "/backends")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from bagua_rt.backends import _nccl_library as library
from bagua_rt.errors import BackendUnavailableError
order = json.loads(sys.argv[2])
kept = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in order["loaded"]]
if not order["wheel"]:
    library._wheel_files = lambda: []
try:
    found = library.find_nccl(order["path"])
    answer = {"path": str(found.path), "version": found.version_text, "origin": found.origin}
    answer["text"] = str(found)
except BackendUnavailableError as error:
    answer = {"error": str(error)}
print(json.dumps({**answer, "in_process": [str(path) for path in library.loaded_paths()]}))
"""


@dataclass(frozen=True)
class Found:
    path: str = ""
    version: str = ""
    origin: str = ""
    text: str = ""
    error: str = ""
    in_process: tuple[str, ...] = ()


def search(
    path: Path | None = None,
    *,
    loaded: tuple[Path, ...] = (),
    wheel: bool = False,
    nccl: str | None = None,
    library_path: Path | None = None,
    python_path: Path | None = None,
    cwd: Path | None = None,
) -> Found:
    environ = {
        key: value for key, value in os.environ.items() if key not in ("BAGUA_RT_NCCL", "LD_LIBRARY_PATH")
    }
    environ["PYTHONPATH"] = str(python_path or "")
    if nccl is not None:
        environ["BAGUA_RT_NCCL"] = nccl
    if library_path is not None:
        environ["LD_LIBRARY_PATH"] = str(library_path)
    order = {"path": None if path is None else str(path), "loaded": [*map(str, loaded)], "wheel": wheel}
    package = Path(bagua_rt.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(package), json.dumps(order)],
        capture_output=True, text=True, timeout=60, env=environ, cwd=cwd, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return Found(**{**answer, "in_process": tuple(answer["in_process"])})


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nccl.build(tmp_path_factory.mktemp("old"), "FAKE_VERSION=22703")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nccl.build(tmp_path_factory.mktemp("new"), "FAKE_VERSION=23000")


@pytest.fixture
def wheel(tmp_path: Path, new: Path) -> Path:
    """A folder for PYTHONPATH with an nvidia-nccl wheel in it."""
    folder = tmp_path / "wheel" / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / new.name).write_bytes(new.read_bytes())
    return tmp_path / "wheel"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (2304, "2.3.4"),
        (2804, "2.8.4"),
        (20903, "2.9.3"),
        (21005, "2.10.5"),
        (22705, "2.27.5"),
        (23000, "2.30.0"),
        (23203, "2.32.3"),
    ],
)
def test_version_codes_are_decoded_exactly(code: int, text: str) -> None:
    assert version_text(code) == text


class TestOrder:
    def test_an_explicit_path_goes_before_all_others(self, old: Path, new: Path, wheel: Path) -> None:
        found = search(
            old, loaded=(new,), nccl=str(new), wheel=True, python_path=wheel, library_path=new.parent
        )
        assert (found.path, found.version, found.origin) == (str(old), "2.27.3", "the path given")
        assert found.text == f"NCCL 2.27.3 from {old} (the path given)"

    def test_the_variable_goes_before_a_loaded_one(self, old: Path, new: Path, wheel: Path) -> None:
        found = search(loaded=(new,), nccl=str(old), wheel=True, python_path=wheel)
        assert (found.path, found.origin) == (str(old), "the path in BAGUA_RT_NCCL")

    def test_a_loaded_one_goes_before_the_wheel_and_stays_the_only_one(self, old: Path, wheel: Path) -> None:
        found = search(loaded=(old,), wheel=True, python_path=wheel)
        assert (found.path, found.version, found.origin) == (str(old), "2.27.3", "already in this process")
        assert found.in_process == (str(old),)

    @pytest.mark.parametrize("swapped", [False, True])
    def test_of_two_loaded_ones_the_first_is_taken(self, old: Path, new: Path, swapped: bool) -> None:
        first, second = (new, old) if swapped else (old, new)
        assert search(loaded=(first, second)).path == str(first)

    def test_a_loaded_one_without_a_soname_is_found_by_its_file(self, tmp_path: Path, wheel: Path) -> None:
        nameless = fake_nccl.build(tmp_path / "nameless", soname="")
        found = search(loaded=(nameless,), wheel=True, python_path=wheel)
        assert (found.path, found.origin) == (str(nameless), "already in this process")

    def test_the_wheel_goes_before_the_system(self, old: Path, wheel: Path) -> None:
        found = search(wheel=True, python_path=wheel, library_path=old.parent)
        assert (found.version, found.origin) == ("2.30.0", "the wheel")
        assert found.path.startswith(str(wheel))

    def test_the_system_comes_last(self, old: Path) -> None:
        found = search(library_path=old.parent)
        assert (found.path, found.version, found.origin) == (str(old), "2.27.3", "the system")

    def test_a_broken_wheel_is_passed_over(self, old: Path, wheel: Path) -> None:
        (wheel / "nvidia/nccl/lib/libnccl.so.2").write_text("not ELF")
        # Not by the real wheel behind it: the search takes them in the order of the path.
        found = search(wheel=True, python_path=wheel, library_path=old.parent)
        assert found.path
        assert not found.path.startswith(str(wheel))

    def test_a_relative_path_is_a_file_and_not_a_name_to_search_for(self, old: Path, new: Path) -> None:
        found = search(Path(old.name), cwd=old.parent, library_path=new.parent)
        assert found.path == str(old)
        refused = search(Path(old.name), cwd=old.parent.parent, library_path=new.parent)
        assert "no such file" in refused.error


class TestErrors:
    def test_no_library_at_all_lists_every_place_and_why(self) -> None:
        error = search().error
        for part in (
            "no usable NCCL library",
            "already in this process: none is loaded",
            "the wheel: no nvidia-nccl wheel is installed",
            "the system: libnccl.so.2: cannot open shared object file",
            "the system: libnccl.so: cannot open shared object file",
            "set BAGUA_RT_NCCL",
        ):
            assert part in error

    @pytest.mark.parametrize("by_variable", [False, True])
    @pytest.mark.parametrize("kind", ["missing", "text", "folder", "other library"])
    def test_an_ordered_library_is_never_replaced(
        self, tmp_path: Path, old: Path, wheel: Path, kind: str, by_variable: bool
    ) -> None:
        asked = tmp_path / "asked.so"
        why = {
            "missing": "no such file",
            "folder": "no such file",
            "text": "not a shared library",
            "other library": "exports no ncclGetVersion, so it is not NCCL",
        }[kind]
        if kind == "text":
            asked.write_text("this is no library, but it is long enough to hold an ELF header " * 3)
        elif kind == "folder":
            asked.mkdir()
        elif kind == "other library":
            subprocess.run(
                ["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(asked)], check=True, timeout=60
            )
        found = search(
            None if by_variable else asked,
            nccl=str(asked) if by_variable else str(old),
            loaded=(old,),
            wheel=True,
            python_path=wheel,
            library_path=old.parent,
        )
        place = "the path in BAGUA_RT_NCCL" if by_variable else "the path given"
        assert f"{place}: {asked}" in found.error
        assert why in found.error
        assert found.error.count(str(asked)) <= 2  # dlopen's text may name it again, not more
        assert "no other place was tried" in found.error

    def test_importing_the_package_needs_and_loads_no_nccl(self, tmp_path: Path) -> None:
        script = "import bagua_rt, bagua_rt.backends._nccl\nprint(open('/proc/self/maps').read())"
        source = str(Path(bagua_rt.__file__).parents[1])
        environ = {**os.environ, "BAGUA_RT_NCCL": str(tmp_path / "nowhere"), "PYTHONPATH": source}
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=100,
            env=environ,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "libnccl.so" not in done.stdout
