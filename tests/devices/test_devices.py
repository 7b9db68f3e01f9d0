"""What the library does on a device, beside the same on the CPU: nothing mixes the two, and the results are equal.

The device is a pretend one (`pretend.py`), which is built before the first of these tests, once per machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pretend import COMPILER, built

HERE = Path(__file__).parent
CUTTING = ["refuses_mixed_devices", "every_criterion", "cut_and_verified", "half_precision", "plans_from_elsewhere"]
CUTTING += ["without_values", "few_kernels", "saved_and_loaded", "rounds_that_are_taken_up", "random_numbers_stay"]
DATA = [
    "compressed",
    "host_rarely_waits",
    "solved_on_the_device",
    "masks",
    "sparsifiers",
    "zeros_in_one_shot",
    "training",
    "others",
]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ that could build the pretend device")


@pytest.mark.parametrize("jobs", [CUTTING, DATA], ids=["cutting", "data"])
def test_as_on_the_cpu(jobs: list[str], tmp_path: Path) -> None:
    built()
    found = tmp_path / "found.json"
    path = os.pathsep.join([*sys.path, str(HERE), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, HERE / "on_device.py", found, *jobs], env=environment, timeout=500)
    result = json.loads(found.read_text())
    assert [name for name, error in result.items() if not error] == jobs, "\n".join(filter(None, result.values()))
    assert ended.returncode == 0


def test_every_job_is_run() -> None:
    source = (HERE / "on_device.py").read_text()
    assert sorted(CUTTING + DATA) == sorted(line[4:-11] for line in _after(source, "@job") if line.startswith("def "))


def _after(source: str, mark: str) -> list[str]:
    lines = source.splitlines()
    return [lines[number + 1] for number, line in enumerate(lines) if line == mark]
