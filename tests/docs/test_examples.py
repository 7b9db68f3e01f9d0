"""The examples run as they are, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(name: str, *args: Any) -> Any:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](*args)


def test_image_classifier() -> None:
    before, after, report = _run("image_classifier")
    assert before > 0.9
    assert after > before - 0.05
    assert report.macs.after <= 0.5 * report.macs.before


def test_lstm() -> None:
    model, (before, cut, recovered) = _run("lstm")
    assert model.lstm.hidden_size < 48
    assert before > 0.85
    assert recovered > max(cut, before - 0.06)


def test_transformer() -> None:
    model, plan, (before, cut, recovered) = _run("transformer")
    assert plan.axes
    assert all(axis.exact for axis in plan.axes)
    assert model.embed.out_features == 32
    assert before > 0.8
    assert recovered > max(cut, before) - 0.04


def test_plain_loop() -> None:
    found = _run("plain_loop")
    assert found[-1][1] <= 0.3 * found[0][1]
    assert found[-1][2] > 0.9


def test_masks_to_cuts() -> None:
    for before, masked, removed, left in _run("masks_to_cuts").values():
        assert removed == masked  # removal changes no answer
        assert masked > before - 0.03
        assert left < 0.5


def test_rigl() -> None:
    zeros, accuracy = _run("rigl")
    assert 0.89 < zeros < 0.91
    assert accuracy > 0.93


def _by_torchrun(*script: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*command, *map(str, script)], env=environment, capture_output=True, text=True, timeout=400)


BEFORE_ANYTHING = """
import os, time
import torch
import torch.distributed as dist
import secateur as sec
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    print(f"raised at {time.time()}", flush=True)
    raise ValueError("before it came to the library")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
sec.apply(model, sec.plan(sec.trace(model, torch.zeros(1, 4)), sec.Ratio(0.5)))
"""


@pytest.mark.slow
def test_torchrun_ends_those_who_wait_for_a_rank_that_never_came(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BEFORE_ANYTHING)
    done = _by_torchrun(tmp_path / "script.py")
    waited = time.time() - float(re.findall(r"raised at ([\d.]+)", done.stdout)[0])
    assert done.returncode != 0
    assert "before it came to the library" in done.stderr
    assert waited < 20


def test_several_processes(tmp_path: Path) -> None:
    """By torchrun, as the example says."""
    done = _by_torchrun(ROOT / "examples" / "several_processes.py", tmp_path)
    assert done.returncode == 0, done.stderr
    before, after, loaded = (float(part) for part in re.findall(r"([\d.]+)%(?!\))", done.stdout))
    assert before > 85
    assert min(after, loaded) > before - 5
    assert sorted(file.name[:8] for file in (tmp_path / "small").iterdir()) == ["secateur", "shard-00", "shard-00"]


BY_OTHERS = ("iterate", "bert_heads", "penalty_lightning")  # run by the tests of its room, and by `make ecosystem`


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_is_run_and_shown(path: Path) -> None:
    assert f"test_{path.stem}" in globals() or path.stem in BY_OTHERS
    assert f'--8<-- "examples/{path.name}"' in (ROOT / "docs" / "examples.md").read_text()
