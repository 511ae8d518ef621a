"""What the sections found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "FAILED", "skipped", "figure"]


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Attributes:
        name: What.
        verdict: "figure" is a measurement, which nothing is compared with.
        detail: What was found; the reason where it failed or was skipped.
        data: The same for machines.
    """

    name: str
    verdict: Verdict
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"  {self.verdict:<8}{self.name}" + (f": {self.detail}" if self.detail else "")


@dataclass
class SectionReport:
    """What a section found, and how long it took."""

    name: str
    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, verdict: Verdict) -> int:
        """How many lines have this verdict."""
        return sum(line.verdict == verdict for line in self.lines)

    @property
    def verdict(self) -> Verdict:
        """FAILED if any line is; skipped if there is nothing else; else ok."""
        if self.count("FAILED"):
            return "FAILED"
        return "ok" if self.count("ok") or self.count("figure") else "skipped"


def table(sections: Sequence[SectionReport], machine: str) -> str:
    """The short table that ends the report; `machine` says on what it was made."""
    head = f"{'section':<15}{'verdict':<9}{'ok':>5}{'failed':>8}{'skipped':>9}{'figures':>9}{'seconds':>9}"
    rows = [machine, head]
    for section in sections:
        ok, failed = section.count("ok"), section.count("FAILED")
        skipped, figures = section.count("skipped"), section.count("figure")
        rows.append(
            f"{section.name:<15}{section.verdict:<9}{ok:>5}{failed:>8}{skipped:>9}{figures:>9}"
            f"{section.seconds:>9.1f}"
        )
    failed = sum(section.verdict == "FAILED" for section in sections)
    seconds = sum(section.seconds for section in sections)
    rows.append(f"{failed} of {len(sections)} sections failed, {seconds:.0f} s")
    return "\n".join(rows)


def as_json(sections: Sequence[SectionReport], machine: str, facts: dict[str, Any]) -> str:
    """Everything, for machines."""
    content = {
        "machine": machine,
        "facts": facts,
        "sections": {
            section.name: {
                "verdict": section.verdict,
                "seconds": round(section.seconds, 2),
                "lines": [asdict(line) for line in section.lines],
            }
            for section in sections
        },
    }
    return json.dumps(content, indent=1)
