"""The example runs as it is, reaches its target above its floor, and can be stopped."""

import runpy
from pathlib import Path

_EXAMPLE = Path(__file__).parents[2] / "examples" / "iterate.py"


def test_the_example(tmp_path):
    main = runpy.run_path(str(_EXAMPLE))["main"]
    found = main(str(tmp_path))
    assert found.best.part == 1
    assert found.best.macs <= 0.25 * found.rounds[0].macs
    assert found.best.after >= 0.95
    assert main(str(tmp_path)) == found
