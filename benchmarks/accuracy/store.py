"""Results, one small file per configuration: a run that is killed goes on where it was."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.accuracy import packages

Record = dict[str, Any]

_HERE = Path(__file__).parent
_LIBRARY = _HERE.parent.parent / "src" / "secateur"
_HARNESS = tuple(
    _HERE / f"{name}.py"
    for name in ("cutting", "data", "language", "models", "nets", "peers", "reviews", "suite", "tasks", "training")
)


def fingerprint(library: str) -> str:
    """Changes when the code that a result of this library depends on does."""
    files = [*_HARNESS]
    if library != "torch-pruning":
        files += sorted(_LIBRARY.rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Store:
    """What has been measured already, by configuration and by the code that it was measured with.

    A fresh store measures everything once more.
    """

    def __init__(self, fresh: bool = False) -> None:
        self._fresh = fresh
        self._measured: set[Path] = set()
        self.fingerprints = {library: fingerprint(library) for library in ("torch-pruning", "secateur", "stand-in")}

    def get(self, configuration: Record, library: str, measure: Callable[[], Record]) -> Record:
        """The record of a configuration: from its file, or measured now and put there."""
        key = "-".join(str(value).replace(" ", "_").replace("/", "_") for value in configuration.values())
        path = packages.cache("results", self.fingerprints[library], f"{key}.json")
        if path.exists() and (path in self._measured or not self._fresh):
            found: Record = json.loads(path.read_text())
            return found
        record = {**configuration, "library": library, **measure()}
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(record, indent=1))
        part.replace(path)
        self._measured.add(path)
        return record
