"""The same plan, and the same words, in every process: ranks agree, and what one run refuses another does too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planned import main


def test_processes_that_hash_differently_plan_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """This one, and another."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("planned.py"))],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
    )
    main()
    one = capsys.readouterr().out
    assert "Params(0.75) cannot be reached" in one
    assert one == other.communicate()[0]
    assert other.returncode == 0
