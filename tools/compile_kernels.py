#!/usr/bin/env python3
"""Compile every kernel for the architectures that users have, and print what each one takes.

Needs NVRTC, but no GPU and no driver: registers, stack and shared memory are read from the compiled code
itself. A kernel without stack does not spill. Exits with 1 if a kernel does not compile.

    python tools/compile_kernels.py                        all kernels for sm_70, 80, 90, 100 and 120
    python tools/compile_kernels.py --arch 90 --only minmax_encode
    python tools/compile_kernels.py --sources FOLDER       writes the texts, compiles nothing
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bagua_rt.backends._nvrtc import Target, Variant, compile_source, nvrtc_version, variants
from bagua_rt.errors import NvrtcError

ARCHITECTURES = (70, 80, 90, 100, 120)

# Attributes of .nv.info, each with a value per kernel.
_FRAME_BYTES = 0x11
_REGISTERS = 0x2F
_WITH_SIZE = 0x04  # the format of an entry whose payload has its length in front


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    size: int
    link: int


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _sections(image: bytes) -> list[_Section]:
    """The sections of a 64-bit ELF file."""
    offset = struct.unpack_from("<Q", image, 0x28)[0]
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * entry_bytes) for i in range(count)]
    names = image[headers[names_index][4] :][: headers[names_index][5]]
    # Type 8 (NOBITS): the section has a size, but nothing in the file.
    return [
        _Section(_text(names, h[0]), b"" if h[1] == 8 else image[h[4] : h[4] + h[5]], h[5], h[6])
        for h in headers
    ]


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) of each entry of .nv.info that has both."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _WITH_SIZE:
            continue  # the two bytes read as its size are its value
        if size == 8:
            yield (attribute, *struct.unpack_from("<II", info, at))
        at += size


def resource_usage(cubin: bytes) -> dict[str, Usage]:
    """Registers, stack, shared memory and code size of each kernel in a cubin."""
    sections = _sections(cubin)
    symbols = next(section for section in sections if section.name == ".symtab")
    strings = sections[symbols.link].data
    found: dict[tuple[int, str], int] = {}
    for section in sections:
        if section.name == ".nv.info":
            for attribute, symbol, value in _attributes(section.data):
                at = struct.unpack_from("<I", symbols.data, symbol * 24)[0]
                found[attribute, _text(strings, at)] = value
    sizes = {section.name: section.size for section in sections}
    return {
        kernel: Usage(
            registers=registers,
            stack_bytes=found.get((_FRAME_BYTES, kernel), 0),
            shared_bytes=sizes.get(f".nv.shared.{kernel}", 0),
            code_bytes=sizes[f".text.{kernel}"],
        )
        for (attribute, kernel), registers in found.items()
        if attribute == _REGISTERS and f".text.{kernel}" in sizes
    }


def _compile(variant: Variant, architecture: int) -> dict[str, Usage] | NvrtcError:
    try:
        return resource_usage(
            compile_source(variant.source(), f"{variant.operation}.cu", Target(f"sm_{architecture}"))
        )
    except NvrtcError as error:
        return error


def _chosen(only: Sequence[str], every_pair: bool) -> list[Variant]:
    def wanted(variant: Variant) -> bool:
        common = len({*variant.elements, "Float32"}) <= 2  # one type, or one and float32
        return (not only or variant.operation in only) and (every_pair or common)

    return [variant for variant in variants() if wanted(variant)]


def _print_table(results: dict[str, dict[int, Usage]], architectures: Sequence[int]) -> None:
    columns = "".join(f"{f'sm_{architecture}':>8}" for architecture in architectures)
    print(f"{'kernel':<34}{'registers':^{len(columns)}}{'stack':>7}{'shared':>8}{'code, KiB':>11}")
    print(f"{'':<34}{columns}")
    for kernel, by_architecture in results.items():
        used = by_architecture.values()
        registers = "".join(
            f"{by_architecture[a].registers if a in by_architecture else 'failed':>8}" for a in architectures
        )
        print(
            f"{kernel:<34}{registers}{max((u.stack_bytes for u in used), default=0):>7}"
            f"{max((u.shared_bytes for u in used), default=0):>8}"
            f"{max((u.code_bytes for u in used), default=0) / 1024:>11.1f}"
        )


def _write_sources(folder: Path, chosen: Sequence[Variant]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for variant in chosen:
        (folder / f"{variant.entry()}.cu").write_text(variant.source(), encoding="utf-8")
    print(f"{len(chosen)} kernel texts in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, metavar="NN")
    parser.add_argument("--only", nargs="+", default=(), metavar="OPERATION")
    parser.add_argument("--every-pair", action="store_true", help="the copies between any two types too")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="write the complete texts and stop")
    options = parser.parse_args(arguments)
    chosen = _chosen(options.only, options.every_pair)
    if options.sources:
        _write_sources(options.sources, chosen)
        return 0
    begin = time.perf_counter()
    jobs = [(variant, architecture) for variant in chosen for architecture in options.arch]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda job: _compile(*job), jobs))
    results: dict[str, dict[int, Usage]] = {}
    errors: list[NvrtcError] = []
    for (variant, architecture), outcome in zip(jobs, outcomes, strict=True):
        if isinstance(outcome, NvrtcError):
            results.setdefault(variant.entry(), {})
            errors.append(outcome)
            continue
        for kernel, usage in outcome.items():
            results.setdefault(kernel, {})[architecture] = usage
    _print_table(results, options.arch)
    print(f"NVRTC {nvrtc_version()}: {len(jobs)} compilations in {time.perf_counter() - begin:.0f} s")
    for error in errors[:3]:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
