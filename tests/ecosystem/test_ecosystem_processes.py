"""Cuts, penalties and masks in other people's loops, in two processes: real runs of the real packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ecosystem
SCRIPT = Path(__file__).with_name("processes_of_packages.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    paths = [str(SCRIPT.parent), str(SCRIPT.parents[1]), *sys.path]
    threads = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([*command, str(SCRIPT), str(folder)], check=True, timeout=900, env=environment)
    return [json.loads((folder / rank).read_text()) for rank in "01"]


LOOPS = ("transformers", "lightning", "accelerate")
RUNS = [f"{loop} {kind}" for loop in LOOPS for kind in ("cuts", "learned", "masks")]


@pytest.mark.parametrize("kind", [*RUNS, "lightning averages", "lightning floor", "accelerate bf16"])
def test_both_processes_end_with_the_same_model(two, kind):
    (same, right), (others, _) = (rank[kind] for rank in two)
    assert same == others
    assert "DistributedDataParallel" in same, same
    assert all(right), right
