"""The same plan, and the same words, in every process: ranks agree, and what one run refuses another does too."""

import os
import subprocess
import sys
from pathlib import Path


def test_processes_that_hash_differently_plan_the_same() -> None:
    run = [sys.executable, str(Path(__file__).with_name("planned.py"))]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    runs = [
        subprocess.Popen(
            run, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": s}
        )
        for s in ("1", "2")
    ]
    one, other = (process.communicate()[0] for process in runs)
    assert [process.returncode for process in runs] == [0, 0]
    assert "Params(0.75) cannot be reached" in one
    assert one == other
