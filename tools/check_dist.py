"""Install a wheel into an empty environment and run the README's first Python example there.

    python tools/check_dist.py dist/secateur-0.2.0-py3-none-any.whl

The environment holds what the wheel and its demo ask for and nothing else; the example runs in a folder without the
source.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def example(page: Path) -> str:
    """The first Python block of a page."""
    found = re.search(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"{page} has no Python block")
    return found[1]


def main(wheel: str) -> None:
    """Install, run, and show what the example prints."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "env"), with_pip=True)
        python = Path(folder, "env", "Scripts" if sys.platform == "win32" else "bin", "python")
        install = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            ROOT / "constraints.txt",
            f"{Path(wheel).resolve()}[demo]",
        ]
        subprocess.run(install, check=True)
        # Isolated: neither PYTHONPATH nor the folder of this script can lend it a module.
        subprocess.run([python, "-I", "-c", example(ROOT / "README.md")], check=True, cwd=folder)
    print(f"{Path(wheel).name}: installed and run")


if __name__ == "__main__":
    main(*sys.argv[1:])
