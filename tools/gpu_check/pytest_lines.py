"""A pytest plugin: a line of JSON for each test, as soon as it has ended: a run may be cut short."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    """The option that says where to."""
    parser.addoption("--lines", help="file that gets a line of JSON for each test")


def pytest_configure(config: Any) -> None:
    """Write only where the option asks for it."""
    if config.getoption("--lines"):
        config.pluginmanager.register(_Lines(Path(config.getoption("--lines"))), "gpu_check lines")


class _Lines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def _write(self, **content: Any) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: Any) -> None:
        self._write(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(began=nodeid, at=time.time())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else report.longreprtext[-2000:]
            self._write(test=report.nodeid, outcome=report.outcome, text=text)
