"""Compare bagua_rt's picture of NCCL's C API with what a compiler makes of nccl.h.

    python tools/nccl_layouts.py                          the header of the installed wheel
    python tools/nccl_layouts.py PATH/nccl.h …            any headers
    python tools/nccl_layouts.py --write PATH/nccl.h …    make tests/nccl_layouts.json anew from these headers

Checked for each header: ncclConfig_t's fields, offsets and initialiser byte for byte, ncclSimInfo_t's
initialiser, the enumerators and their sizes, the C types of every function that is bound, the prototypes in
the comments, and that a function's "since" agrees with the headers that lack it. Needs gcc; no CUDA. Exit
code 1 on any difference.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_rt.backends import _nccl_functions as functions
from bagua_rt.backends._nccl_config import make_config, make_sim_info
from bagua_rt.backends._nccl_library import NcclLibrary, version_text

TABLE = Path(__file__).resolve().parents[1] / "tests" / "nccl_layouts.json"

# nccl.h needs these of CUDA's headers, and nothing else of them.
_STUBS = {
    "cuda_runtime.h": "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    "#define CUDART_VERSION 12000\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}
_DATATYPES = "Int8 Uint8 Int32 Uint32 Int64 Uint64 Float16 Float32 Float64 Bfloat16 Float8e4m3 Float8e5m2"
ENUMERATORS: Mapping[str, int] = {
    **{
        name: value for value, name in enumerate(functions.STATUS_NAMES) if name != "ncclTimeout"
    },  # new in 2.31
    **{f"nccl{name.capitalize()}": value for name, value in functions.OPS.items()},
    **{f"nccl{name}": value for value, name in enumerate(_DATATYPES.split())},
    "ncclScalarHostImmediate": functions.SCALAR_HOST_IMMEDIATE,
    "NCCL_SPLIT_NOCOLOR": functions.SPLIT_NOCOLOR,
    "NCCL_SHRINK_DEFAULT": functions.SHRINK_DEFAULT,
    "NCCL_SHRINK_ABORT": functions.SHRINK_ABORT,
    "NCCL_WIN_DEFAULT": functions.WINDOW_DEFAULT,
    "NCCL_WIN_COLL_SYMMETRIC": functions.WINDOW_SYMMETRIC,
    "NCCL_UNIQUE_ID_BYTES": functions.UNIQUE_ID_BYTES,
    "sizeof(ncclResult_t)": 4,
    "sizeof(ncclDataType_t)": 4,
    "sizeof(ncclRedOp_t)": 4,
    "sizeof(ncclScalarResidence_t)": 4,
}

# What a C type is to a caller; ctypes types are put into the same words by `_kind_of_ctype`.
_KINDS = {
    "int": "int ncclResult_t ncclDataType_t ncclRedOp_t ncclScalarResidence_t",
    "size": "size_t",
    "int*": "int* ncclResult_t* ncclRedOp_t*",
    "pointer": "void* ncclComm_t cudaStream_t ncclWindow_t ncclConfig_t* ncclSimInfo_t*",
    "pointer*": "void** ncclComm_t* ncclWindow_t*",
    "id": "ncclUniqueId",
    "id*": "ncclUniqueId*",
    "text": "char*",
}
_KIND_OF_C = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_KIND_OF_CTYPE: Mapping[Any, str] = {
    ctypes.c_int: "int",
    ctypes.c_size_t: "size",
    ctypes.POINTER(ctypes.c_int): "int*",
    ctypes.c_void_p: "pointer",
    ctypes.POINTER(ctypes.c_void_p): "pointer*",
    functions.UniqueId: "id",
    ctypes.POINTER(functions.UniqueId): "id*",
    ctypes.c_char_p: "text",
}


@dataclass(frozen=True)
class Header:
    """What one nccl.h says.

    Attributes:
        version: Its version code.
        layout: What the compiler makes of its structs and enumerators.
        prototypes: Function name to prototype, in the spelling of `_spelled`.
    """

    version: int
    layout: dict[str, Any]
    prototypes: dict[str, str]


def installed_header() -> Path | None:
    """The nccl.h of the installed nvidia-nccl wheel."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((path for root in roots if (path := Path(root) / "nccl/include/nccl.h").exists()), None)


def read_header(path: Path) -> Header:
    """Read `path`, and compile and run a probe that includes it."""
    text = path.read_text()
    body = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", text, re.DOTALL)
    if body is None:
        raise SystemExit(f"{path}: no ncclConfig_t in it")
    fields = re.findall(r"(\w+);", _uncommented(body.group(1)))
    prototypes = {}
    for declaration in re.findall(
        r"(?:ncclResult_t|const char\*)\s+nccl\w+\s*\([^)]*\);", _uncommented(text)
    ):
        spelled = _spelled(declaration)
        prototypes[_name_in(spelled)] = spelled
    layout = _probe(path, fields)
    return Header(layout.pop("version"), layout, prototypes)


def _probe(header: Path, fields: list[str]) -> dict[str, Any]:
    rows = ['printf("version %d\\n", NCCL_VERSION_CODE); printf("size %zu\\n", sizeof(ncclConfig_t));']
    rows += [
        f'printf("field {name} %zu %zu\\n", offsetof(ncclConfig_t, {name}), sizeof config.{name});'
        for name in fields
    ]
    rows += [f'printf("value {name} %d\\n", (int){name});' for name in ENUMERATORS]
    source = f"""
        #include <stddef.h>
        #include <stdio.h>
        #include "{header.resolve()}"
        static const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        static const ncclSimInfo_t simulation = NCCL_SIM_INFO_INITIALIZER;
        static void dump(const char* name, const void* at, size_t size) {{
            printf("bytes %s ", name);
            for (size_t i = 0; i < size; ++i) printf("%02x", ((const unsigned char*)at)[i]);
            printf("\\n");
        }}
        int main(void) {{
            {"".join(rows)}
            dump("config", &config, sizeof config);
            dump("sim_info", &simulation, sizeof simulation);
            return 0;
        }}
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, stub in _STUBS.items():
            (Path(folder) / name).write_text(stub)
        probe = Path(folder) / "probe"
        probe.with_suffix(".c").write_text(source)
        command = ["gcc", "-w", f"-I{folder}", "-o", str(probe), str(probe.with_suffix(".c"))]
        subprocess.run(command, check=True, timeout=60)
        output = subprocess.run([probe], check=True, timeout=60, capture_output=True, text=True).stdout
    layout: dict[str, Any] = {"fields": {}, "values": {}}
    for line in output.splitlines():
        match line.split():
            case ["field", name, offset, size]:
                layout["fields"][name] = [int(offset), int(size)]
            case ["value", name, value]:
                layout["values"][name] = int(value)
            case ["bytes", name, dump]:
                layout[name] = dump
            case [name, value]:
                layout[name] = int(value)
    return layout


def layout_differences(version: int, layout: Mapping[str, Any]) -> list[str]:
    """Differences between the package and a header's `layout` (as `read_header` or the table has it)."""
    library = NcclLibrary(Path("nccl.h"), version, "a header", ctypes.CDLL(None))
    config = make_config(library, {})
    found = []
    ours: dict[str, Any] = {
        "size": ctypes.sizeof(config),
        "config": bytes(config).hex(),
        "sim_info": bytes(make_sim_info(library)).hex(),
        "values": dict(ENUMERATORS),
        "fields": {name: _place_of(type(config), name) for name, _ in type(config)._fields_},
    }
    for name, mine in ours.items():
        if mine != layout[name]:
            found.append(f"NCCL {version_text(version)}: {name}: ours {mine}, nccl.h {layout[name]}")
    return found


def _place_of(kind: Any, name: str) -> list[int]:
    descriptor = getattr(kind, name)
    return [descriptor.offset, descriptor.size]


def signature_differences(
    prototypes: Mapping[str, str], rows: Mapping[str, functions.Row] = functions.ROWS
) -> list[str]:
    """Rows whose C types differ from `prototypes`; functions that are not in `prototypes` are passed over."""
    found = []
    for name, row in rows.items():
        if name in prototypes:
            ours = [_KIND_OF_CTYPE[row.result], *(_KIND_OF_CTYPE[each] for each in row.arguments)]
            theirs = [_KIND_OF_C[each] for each in _types_in(prototypes[name])]
            if ours != theirs:
                found.append(f"{name}: the row says {ours}, nccl.h says {theirs}")
    return found


def comment_differences(prototypes: Mapping[str, str]) -> list[str]:
    """Comments above the rows that are not the prototype in `prototypes`, and rows without one."""
    source = Path(functions.__file__).read_text()
    comments = {}
    for comment, name in re.findall(r'((?:^ +# .*\n)+) +"(nccl\w+)": Row', source, re.MULTILINE):
        comments[name] = _spelled(re.sub(r"^ +#", "", comment, flags=re.MULTILINE))
    return [
        f"{name}: the comment says {comments.get(name)}, nccl.h says {prototypes[name]}"
        for name in functions.ROWS
        if name in prototypes and comments.get(name) != prototypes[name]
    ]


def since_differences(version: int, names: set[str]) -> list[str]:
    """Rows whose `since` says otherwise than the header of `version`, which declares `names`."""
    return [
        f"{name}: since {version_text(row.since)}, but nccl.h {version_text(version)} "
        f"{'has' if name in names else 'lacks'} it"
        for name, row in functions.ROWS.items()
        if (row.since <= version) != (name in names)
    ]


def _uncommented(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def _spelled(declaration: str) -> str:
    """A declaration in one spelling: one space between words, stars at the type."""
    text = " ".join(declaration.split()).replace("( ", "(").replace(" (", "(")
    return re.sub(r"\s*(\*+)\s*", r"\1 ", text)


def _name_in(spelled: str) -> str:
    return spelled.split("(", maxsplit=1)[0].rsplit(maxsplit=1)[-1]


def _types_in(spelled: str) -> list[str]:
    """The result's type and the parameters', without const."""
    head, parameters = spelled.rstrip(";").rstrip(")").split("(")
    types = [head.rsplit(maxsplit=1)[0]]
    types += [each.strip().rsplit(maxsplit=1)[0] for each in parameters.split(",") if each.strip()]
    return [each.removeprefix("const ") for each in types]


def _write(headers: list[Header]) -> None:
    newest = max(headers, key=lambda each: each.version)
    bound = {name: newest.prototypes[name] for name in functions.ROWS}
    for header in headers:
        for name, prototype in bound.items():
            older = header.prototypes.get(name, prototype)
            if _types_in(older) != _types_in(prototype):
                raise SystemExit(f"{name} differs in {version_text(header.version)}: {older}")
    values = newest.layout["values"]
    if any(header.layout.pop("values") != values for header in headers):
        raise SystemExit("an enumerator's value differs between these headers")
    versions = {
        version_text(header.version): {
            "version": header.version,
            **header.layout,
            "lacks": [name for name in bound if name not in header.prototypes],
        }
        for header in sorted(headers, key=lambda each: each.version)
    }
    text = json.dumps({"prototypes": bound, "values": values, "versions": versions}, indent=1)
    flat = re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text)
    TABLE.write_text(flat + "\n")


def main() -> int:
    """Check, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "headers", nargs="*", type=Path, help="nccl.h files; none takes the installed wheel's"
    )
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} from these headers")
    options = parser.parse_args()
    installed = installed_header()
    paths = options.headers or ([installed] if installed is not None else [])
    if not paths:
        parser.error("no nvidia-nccl wheel is installed: name a header")
    headers = [read_header(path) for path in paths]
    found = []
    for header in headers:
        found += layout_differences(header.version, header.layout)
        found += signature_differences(header.prototypes)
        found += since_differences(header.version, set(header.prototypes))
        size, count = header.layout["size"], len(header.layout["fields"])
        print(f"NCCL {version_text(header.version)}: ncclConfig_t has {size} bytes and {count} fields")
    found += comment_differences(max(headers, key=lambda each: each.version).prototypes)
    for line in found:
        print(line)
    print(f"{len(headers)} headers, {len(functions.ROWS)} functions, {len(found)} differences")
    if options.write and not found:
        _write(headers)
        print(f"wrote {TABLE}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
