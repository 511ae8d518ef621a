"""NVRTC takes every kernel; the cache on disk; the choice of architecture; errors. No GPU is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bagua_rt.backends import _nvrtc
from bagua_rt.backends._nvrtc import ELEMENTS, OPERATIONS, KernelCache, Target, Variant, target_for, variants
from bagua_rt.errors import BackendUnavailableError, NvrtcError, UsageError
from tests.ranks import rank_environment

KERNELS = _nvrtc.kernels_folder()
KNOWN = [50, 60, 70, 75, 80, 86, 89, 90, 100, 101, 103, 120, 121]
SIMPLE = Variant("add_difference", ("Float32",))


@pytest.fixture(scope="session")
def nvrtc() -> str:
    """NVRTC's version; skips where the library is not installed."""
    try:
        return _nvrtc.nvrtc_version()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def usable(text: str) -> list[tuple[int, str]]:
    """Lines of a source without comments."""
    return list(enumerate((line.split("//")[0] for line in text.splitlines()), 1))


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cu*")), ids=lambda path: path.name)
def test_rules_of_the_folder(path: Path) -> None:
    text = path.read_text()
    for number, line in usable(text):
        assert not re.match(r"\s*#\s*include", line), f"{path.name}:{number}: NVRTC has no headers"
        assert not re.search(r"\b(int|unsigned) i\b.*blockIdx", line), f"{path.name}:{number}: a 32-bit index"
    assert max(map(len, text.splitlines())) <= 100
    if path.suffix == ".cu":
        assert 'extern "C" __global__' in text
        for word in ("Shapes", "Launch", "Moves", "Oracle"):
            assert re.search(rf"^// {word}.*:", text, re.MULTILINE), f"the header lacks {word}"


def test_every_file_is_an_operation() -> None:
    assert {path.stem for path in KERNELS.glob("*.cu")} == OPERATIONS.keys()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiles_without_spills(operation: str, nvrtc: str, tmp_path: Path) -> None:
    from tools.compile_kernels import resource_usage

    cache = KernelCache(Target("sm_90"), tmp_path)
    elements = ("Float16",) if len(OPERATIONS[operation]) == 1 else ("BFloat16", "Float32")
    variant = Variant(operation, elements)
    usage = resource_usage(cache.binary(variant))
    assert variant.entry() in usage
    for kernel, used in usage.items():
        assert used.stack_bytes == 0, f"{kernel} spills"
        assert 0 < used.registers <= 64, f"{kernel} can't fill a multiprocessor: {used.registers} registers"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_variant_compiles(nvrtc: str, tmp_path: Path) -> None:
    """Each once, on the oldest and the newest architecture in turn; `make kernels` compiles all for all."""
    oldest = "sm_70" if nvrtc.startswith("12.") else "sm_80"
    for i, variant in enumerate(variants()):
        assert KernelCache(Target((oldest, "sm_120")[i % 2]), tmp_path).binary(variant)


def test_entries_are_named_after_their_elements() -> None:
    assert Variant.of("copy_in", "bfloat16", "float32").entry() == "copy_in_BFloat16_Float32"
    assert Variant.of("sign_encode", "float16").entry("sign_encode_sums") == "sign_encode_sums_Float16"
    names = [variant.entry() for variant in variants()]
    assert len(names) == len(set(names)) == 9 * len(ELEMENTS) + 2 * len(ELEMENTS) ** 2


@pytest.mark.parametrize(("operation", "dtypes"), [("copy_in", ["float32"]), ("mean", ["float32"]),
                                                   ("mean_rows", ["int32"]), ("mean_rows", [])])  # fmt: skip
def test_an_unknown_variant_is_refused(operation: str, dtypes: list[str]) -> None:
    with pytest.raises(UsageError, match=f"no kernel {operation}"):
        Variant.of(operation, *dtypes)


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────


class Compiler:
    """Stands for NVRTC: says what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Target]] = []
        self.version = "12.9"
        monkeypatch.setattr(_nvrtc, "compile_source", self.compile)
        monkeypatch.setattr(_nvrtc, "nvrtc_version", lambda: self.version)

    def compile(self, source: str, name: str, target: Target) -> bytes:
        self.calls.append((name, target))
        return f"{len(self.calls)} {target} {source}".encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def test_compiled_once_over_processes(compiler: Compiler, tmp_path: Path) -> None:
    first = KernelCache(Target("sm_90"), tmp_path / "made").binary(SIMPLE)
    assert KernelCache(Target("sm_90"), tmp_path / "made").binary(SIMPLE) == first
    assert len(compiler.calls) == 1


def test_everything_that_matters_is_in_the_key(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs() -> bool:
        before = len(compiler.calls)
        KernelCache(target, tmp_path).binary(variant)
        return len(compiler.calls) == before + 1

    target, variant = Target("sm_90"), SIMPLE
    assert differs()
    assert not differs()
    target = Target("sm_80")
    assert differs()
    target = Target("compute_80", "ptx")
    assert differs()
    variant = Variant("add_difference", ("Float64",))
    assert differs()
    compiler.version = "13.0"
    assert differs()
    monkeypatch.setattr(_nvrtc, "_OPTIONS", "-std=c++20")
    assert differs()
    text = Variant.source
    monkeypatch.setattr(Variant, "source", lambda self, folder=None: text(self, folder) + "//")
    assert differs()
    assert not differs()


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda entry: b"",
    lambda entry: b"bagua_rt kernel 1\n",
    lambda entry: b"x" * 4000,
    lambda entry: entry[:-1] + b"?",
    lambda entry: entry.replace(b"kernel 1", b"kernel 0"),  # another version's format
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_again(
    compiler: Compiler, tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    KernelCache(Target("sm_90"), tmp_path).binary(SIMPLE)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    again = KernelCache(Target("sm_90"), tmp_path).binary(SIMPLE)
    assert again.startswith(b"2 ")
    assert "damaged" in caplog.text
    assert KernelCache(Target("sm_90"), tmp_path).binary(SIMPLE) == again
    assert list(tmp_path.iterdir()) == [entry]


def test_a_cache_that_cannot_be_written_is_said_and_survived(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert KernelCache(Target("sm_90"), tmp_path / "file" / "below").binary(SIMPLE).startswith(b"1 ")
    assert "BAGUA_RT_CACHE_DIR" in caplog.text


def test_a_failed_write_leaves_nothing_behind(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert KernelCache(Target("sm_90"), tmp_path).binary(SIMPLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [Target("sm_90"), Target("compute_90", "ptx")])
def test_threads_load_a_kernel_once(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    loads: list[str] = []
    another = threading.Event()

    def get_kernel(name: str) -> object:
        loads.append(name)
        if len(loads) > 1:
            another.set()
        another.wait(0.1)  # time for a second thread to come in, could it
        return object()

    code = SimpleNamespace(get_kernel=get_kernel)
    core = SimpleNamespace(ObjectCode=SimpleNamespace(**{f"from_{target.code_type}": lambda binary: code}))
    monkeypatch.setattr(_nvrtc, "_cuda", lambda module: core)
    cache, kernels = KernelCache(target, tmp_path), []
    threads = [threading.Thread(target=lambda: kernels.append(cache.kernel(SIMPLE))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["add_difference_Float32"]
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1


# ── architectures and errors ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("capability", "architecture", "code_type"),
    [
        ((9, 0), "sm_90", "cubin"),
        ((8, 7), "sm_86", "cubin"),  # not known: the family's next lower runs
        ((12, 1), "sm_121", "cubin"),
        ((12, 9), "sm_121", "cubin"),
        ((11, 0), "compute_103", "ptx"),  # another family: the driver has to finish the work
        ((14, 0), "compute_121", "ptx"),
    ],
)
def test_the_newest_architecture_that_fits(
    capability: tuple[int, int], architecture: str, code_type: str
) -> None:
    target = target_for(capability, KNOWN)
    assert (target.architecture, target.code_type) == (architecture, code_type)


def test_a_device_older_than_nvrtc_knows_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match=r"capability 3\.5 · expected 5\.0 or newer"):
        target_for((3, 5), KNOWN)


def test_nvrtc_is_asked_for_what_it_knows(nvrtc: str) -> None:
    assert target_for((9, 0)).architecture == "sm_90"


def test_an_error_holds_log_and_options(nvrtc: str) -> None:
    with pytest.raises(NvrtcError) as caught:
        _nvrtc.compile_source('#line 7 "broken.cu"\nint x = missing;\n', "broken.cu", Target("sm_90"))
    text = str(caught.value)
    assert 'broken.cu(7): error: identifier "missing" is undefined' in text
    assert "-arch=sm_90 -std=c++17" in text
    assert nvrtc in text


def test_missing_sources_name_the_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_nvrtc, "__file__", str(tmp_path / "a" / "b" / "c" / "_nvrtc.py"))
    with pytest.raises(BackendUnavailableError, match="sources are missing"):
        _nvrtc.kernels_folder()


def test_a_wheel_has_its_kernels_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside = tmp_path / "site-packages" / "bagua_rt" / "kernels"
    inside.mkdir(parents=True)
    (inside / "prelude.cuh").write_text("")
    monkeypatch.setattr(_nvrtc, "__file__", str(inside.parent / "backends" / "_nvrtc.py"))
    assert _nvrtc.kernels_folder() == inside


def test_importing_needs_no_cuda() -> None:
    code = "import sys; sys.modules['cuda'] = None; import bagua_rt.backends._nvrtc as n\n"
    code += "try: n.nvrtc_version()\nexcept n.BackendUnavailableError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "bagua-rt[cu12]" in done.stdout
