"""nccl.h of every release against the rows, the prototypes and the config layouts (case B61)."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from bagua_rt.backends import _nccl_functions as functions
from bagua_rt.backends._nccl_config import FIELDS, NEWEST, config_type, make_config, make_sim_info
from bagua_rt.backends._nccl_library import NcclLibrary, version_text
from bagua_rt.errors import BackendUnavailableError, UsageError
from tools import nccl_layouts

TABLE: dict[str, Any] = json.loads(nccl_layouts.TABLE.read_text())


def library_of(version: int) -> NcclLibrary:
    return NcclLibrary(Path("/some/libnccl.so.2"), version, "a test", ctypes.CDLL(None))


class TestHeader:
    """What the package says of nccl.h against what a compiler made of every release's (B61)."""

    @pytest.mark.parametrize("release", TABLE["versions"])
    def test_layouts_and_initialisers_byte_for_byte(self, release: str) -> None:
        layout = TABLE["versions"][release]
        assert version_text(layout["version"]) == release
        assert nccl_layouts.layout_differences(layout["version"], {**layout, "values": TABLE["values"]}) == []

    def test_every_minor_release_is_in_the_table(self) -> None:
        assert {release.rsplit(".", 1)[0] for release in TABLE["versions"]} == {
            f"2.{n}" for n in range(27, 33)
        }

    def test_signatures(self) -> None:
        assert set(TABLE["prototypes"]) == set(functions.ROWS)
        assert nccl_layouts.signature_differences(TABLE["prototypes"]) == []
        assert nccl_layouts.comment_differences(TABLE["prototypes"]) == []

    @pytest.mark.parametrize("release", TABLE["versions"])
    def test_a_function_is_since_the_release_that_has_it(self, release: str) -> None:
        layout = TABLE["versions"][release]
        names = set(TABLE["prototypes"]) - set(layout["lacks"])
        assert nccl_layouts.since_differences(layout["version"], names) == []

    @pytest.mark.parametrize("name", functions.ROWS)
    def test_a_wrong_type_anywhere_is_found(self, name: str) -> None:
        row = functions.ROWS[name]
        for position, right in enumerate(row.arguments):
            for wrong in (ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p):
                if wrong is not right:
                    arguments = (*row.arguments[:position], wrong, *row.arguments[position + 1 :])
                    rows = {name: functions.Row(row.since, arguments, row.result)}
                    assert nccl_layouts.signature_differences(TABLE["prototypes"], rows)
        for arguments in (row.arguments[:-1], (*row.arguments, ctypes.c_int)):
            if arguments != row.arguments:
                rows = {name: functions.Row(row.since, arguments, row.result)}
                assert nccl_layouts.signature_differences(TABLE["prototypes"], rows)

    def test_a_wrong_field_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = {**TABLE["versions"]["2.29.7"], "values": TABLE["values"]}
        for index, each in enumerate(FIELDS):
            if each.since <= layout["version"]:
                fewer = FIELDS[:index] + FIELDS[index + 1 :]
                monkeypatch.setattr("bagua_rt.backends._nccl_config.FIELDS", fewer)
                config_type.cache_clear()
                assert nccl_layouts.layout_differences(layout["version"], layout)
        config_type.cache_clear()

    def test_the_installed_header(self) -> None:
        path = nccl_layouts.installed_header()
        if path is None:
            pytest.skip("no nvidia-nccl wheel is installed")
        header = nccl_layouts.read_header(path)
        known = header.version <= NEWEST
        assert not known or nccl_layouts.layout_differences(header.version, header.layout) == []
        assert nccl_layouts.signature_differences(header.prototypes) == []
        assert nccl_layouts.since_differences(header.version, set(header.prototypes)) == []


class TestConfig:
    def test_one_release_has_two_layouts_of_one_size(self) -> None:
        early, late = config_type(23_004), config_type(23_005)
        assert ctypes.sizeof(early) == ctypes.sizeof(late) == 96
        assert hasattr(late, "graphStreamOrdering")
        assert not hasattr(early, "graphStreamOrdering")

    def test_a_newer_library_gets_the_newest_known_struct(self) -> None:
        config = make_config(library_of(23_501), {"maxCTAs": 4})
        assert bytes(config) == bytes(make_config(library_of(NEWEST), {"maxCTAs": 4}))
        assert (config.size, config.magic, config.version) == (120, 0xCAFEBEEF, NEWEST)
        assert bytes(make_sim_info(library_of(23_501))) == bytes(make_sim_info(library_of(NEWEST)))
        assert make_sim_info(library_of(22_700)).version == 22_700

    def test_a_field_newer_than_the_library_is_refused_by_name(self) -> None:
        make_config(library_of(23_005), {"graphStreamOrdering": 1})
        with pytest.raises(BackendUnavailableError) as caught:
            make_config(library_of(23_004), {"graphStreamOrdering": 1})
        text = "graphStreamOrdering needs NCCL >= 2.30.5, loaded 2.30.4 from /some/libnccl.so.2"
        assert text in str(caught.value)

    def test_a_library_below_every_known_layout_is_refused(self) -> None:
        with pytest.raises(BackendUnavailableError, match=r"needs NCCL >= 2\.27\.0, loaded 2\.26\.5 from"):
            make_config(library_of(22_605), {})

    @pytest.mark.parametrize(
        "options",
        [
            {"minCTAS": 1},
            {"size": 1},
            {"minCTAs": "1"},
            {"minCTAs": 2**31},
            {"commName": 3},
            {"commName": "a\0b"},
        ],
    )
    def test_what_no_config_can_hold_is_refused(self, options: dict[str, int | str]) -> None:
        with pytest.raises(UsageError, match=next(iter(options))):
            make_config(library_of(NEWEST), options)

    def test_values_arrive_at_their_offsets(self) -> None:
        config = bytes(
            make_config(library_of(22_809), {"blocking": 0, "nvlinkCentricSched": 7, "minCTAs": 5})
        )
        fields = TABLE["versions"]["2.28.9"]["fields"]
        ints = {
            name: int.from_bytes(config[at : at + 4], "little", signed=True)
            for name, (at, _) in fields.items()
        }
        set_by_us = ("blocking", "nvlinkCentricSched", "minCTAs", "maxCTAs")
        assert [ints[name] for name in set_by_us] == [0, 7, 5, -(2**31)]
