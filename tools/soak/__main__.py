"""The command line: ``python tools/soak`` and ``python -m tools.soak``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    # Nothing need be installed: package and tests are found in the checkout.
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from tools.soak.driver import main

    sys.exit(main())
