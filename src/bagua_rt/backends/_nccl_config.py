"""ncclConfig_t and ncclSimInfo_t, laid out for the library that is loaded.

[Note: NCCL config layouts]
    ncclConfig_t carries its own size, a magic number and a version; fields are only ever appended. So one
    list of fields, each with the release that brought it, gives every release's struct as a prefix of it.
    The struct's tag in nccl.h can't be used to tell layouts apart: ``ncclConfig_v22800`` is three different
    ones (2.28, 2.29 and 2.30.0-2.30.4), ``ncclConfig_v23100`` two, and 2.30 alone has two layouts. Nor can
    the size, where a new int fills the padding of the last release. The version of the library decides.
    The library copies as many bytes as we say our struct has, and puts defaults in place of fields that are
    newer than the version that we write. So a library newer than `NEWEST` gets that release's struct
    and version, and is fine with it; a library below `OLDEST` is refused.
    tests/nccl_layouts.json holds what a compiler makes of each release's nccl.h; tools/nccl_layouts.py
    writes and checks it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from bagua_rt.backends._nccl_library import NcclLibrary
from bagua_rt.errors import UsageError

OLDEST = 22_700
NEWEST = 23_203
_MAGIC = 0xCAFEBEEF
_SIM_INFO_MAGIC = 0x74685283
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT is INT_MIN; NCCL_CONFIG_UNDEF_PTR is NULL


class Field(NamedTuple):
    """A field of ncclConfig_t, and the version code of the release that brought it."""

    name: str
    type: type[ctypes.c_int] | type[ctypes.c_char_p]
    since: int


_INT, _TEXT = ctypes.c_int, ctypes.c_char_p

FIELDS = (
    Field("blocking", _INT, OLDEST),
    Field("cgaClusterSize", _INT, OLDEST),
    Field("minCTAs", _INT, OLDEST),
    Field("maxCTAs", _INT, OLDEST),
    Field("netName", _TEXT, OLDEST),
    Field("splitShare", _INT, OLDEST),
    Field("trafficClass", _INT, OLDEST),
    Field("commName", _TEXT, OLDEST),
    Field("collnetEnable", _INT, OLDEST),
    Field("CTAPolicy", _INT, OLDEST),
    Field("shrinkShare", _INT, OLDEST),
    Field("nvlsCTAs", _INT, OLDEST),
    Field("nChannelsPerNetPeer", _INT, 22_800),
    Field("nvlinkCentricSched", _INT, 22_800),
    Field("graphUsageMode", _INT, 22_900),
    Field("numRmaCtx", _INT, 22_900),
    Field("maxP2pPeers", _INT, 23_000),
    Field("graphStreamOrdering", _INT, 23_005),
    Field("launchOrderImplicit", _INT, 23_100),
    Field("numRmaSig", _INT, 23_100),
    Field("rmaEagerInit", _INT, 23_100),
    Field("hostCftMode", _INT, 23_100),
    Field("nvlsHostMode", _INT, 23_200),
)
_BY_NAME = {each.name: each for each in FIELDS}


class SimInfo(ctypes.Structure):
    """ncclSimInfo_t: what ncclGroupSimulateEnd fills in."""

    # typedef struct { size_t size; unsigned int magic; unsigned int version; float estimatedTime; }
    #     ncclSimInfo_t;
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("estimatedTime", ctypes.c_float),
    )
    estimatedTime: float  # noqa: N815 - NCCL's name


@functools.cache
def config_type(version: int) -> Any:
    """The ctypes Structure of ncclConfig_t in the release `version` ([Note: NCCL config layouts])."""
    head = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)]
    fields = [(each.name, each.type) for each in FIELDS if each.since <= version]
    return type(f"NcclConfig{version}", (ctypes.Structure,), {"_fields_": (*head, *fields)})


def make_config(library: NcclLibrary, options: Mapping[str, int | str]) -> Any:
    """An ncclConfig_t that `library` understands, with `options` set and the rest left to NCCL.

    Args:
        library: The library that will read it.
        options: Values by NCCL's own field names.

    Returns:
        The ctypes structure; it keeps its texts alive.

    Raises:
        BackendUnavailableError: the library is older than an option, or than every known layout.
        UsageError: no release has such an option, or its value is of the wrong type.

    **Source:** ``ncclConfig_t`` and ``NCCL_CONFIG_INITIALIZER`` in nccl.h.
    """
    if library.version < OLDEST:
        raise library.lacks("making a communicator", OLDEST)
    version = min(library.version, NEWEST)
    kind = config_type(version)
    config = kind(ctypes.sizeof(kind), _MAGIC, version)
    for each in FIELDS:
        if each.since <= version and each.type is _INT:
            setattr(config, each.name, _UNDEFINED)
    for name, value in options.items():
        known = _BY_NAME.get(name)
        if known is None:
            raise UsageError(
                f"ncclConfig_t has no field {name!r}",
                expected=f"one of {', '.join(_BY_NAME)}",
                got=repr(name),
            )
        if known.since > library.version:
            raise library.lacks(f"the communicator option {name}", known.since)
        setattr(config, name, _checked(known, value))
    return config


def _checked(option: Field, value: int | str) -> int | bytes:
    if option.type is _TEXT and isinstance(value, str) and "\0" not in value:
        return value.encode()
    if option.type is _INT and isinstance(value, int) and -(2**31) <= value < 2**31:
        return int(value)
    raise UsageError(
        f"the communicator option {option.name} can't take this value",
        expected="a text without NUL" if option.type is _TEXT else "a 32-bit integer",
        got=repr(value),
    )


def make_sim_info(library: NcclLibrary) -> SimInfo:
    """An ncclSimInfo_t as its initialiser makes it.

    **Source:** ``NCCL_SIM_INFO_INITIALIZER`` in nccl.h.
    """
    return SimInfo(ctypes.sizeof(SimInfo), _SIM_INFO_MAGIC, min(library.version, NEWEST), -1.0)
