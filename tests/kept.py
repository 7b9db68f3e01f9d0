"""Random tests that keep what they find.

`make test` draws the same cases every time. `make fuzz` (`SECATEUR_FUZZ=N`) draws N new ones for each test; the
smallest arguments with which one fails are written to `fuzz/cases/`, and from then on every run begins with them.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis.strategies import SearchStrategy

COUNT = int(os.environ.get("SECATEUR_FUZZ", "0"))
CASES = Path(__file__).parent / "fuzz" / "cases"
Test = Callable[..., None]


def drawn(count: int, folder: Path = CASES, **strategies: SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Run a test with that many examples of its arguments, which are plain data, and with every case that is kept."""

    def decorate(test: Test) -> Test:
        found = given(**strategies)(_keeping(test, folder) if COUNT else test)
        for path in sorted(folder.glob(f"{test.__name__}-*.json")):
            found = example(**json.loads(path.read_text())["arguments"])(found)
        return settings(
            max_examples=COUNT or count,
            deadline=None,
            derandomize=not COUNT,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        )(found)

    return decorate


def _keeping(test: Test, folder: Path) -> Test:
    """Write down with what a test fails; the last that fails in the same way is the smallest."""
    known: dict[tuple[str, ...], Path] = {}

    @wraps(test)
    def run(**arguments: Any) -> None:
        try:
            test(**arguments)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            way = (type(error).__name__, where.filename, str(where.lineno))
            path = known.setdefault(way, _free(folder, test.__name__))
            case = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "arguments": arguments}
            folder.mkdir(exist_ok=True)
            path.write_text(json.dumps(case, indent=1, ensure_ascii=False) + "\n")
            raise

    return run


def _free(folder: Path, name: str) -> Path:
    number = 1
    while (path := folder / f"{name}-{number}.json").exists():
        number += 1
    return path
