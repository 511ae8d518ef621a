"""The command line: ``python tools/gpu_check`` and ``python -m tools.gpu_check``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    # Nothing need be installed: package, tests and examples are found in the checkout.
    sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "examples")]
    from tools.gpu_check.runner import main

    sys.exit(main())
