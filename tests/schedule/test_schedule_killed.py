"""Killed at any moment, a run is taken up again and ends with the same model, report and random state, bit for bit."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KILLED = -9


class Victim:
    """The other process; see victim.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, folder, **request):
        """The exit status of a run and what it printed, if it came that far."""
        self.process.stdin.write(json.dumps({"folder": str(folder), **request}) + "\n")
        self.process.stdin.flush()
        status, printed = json.loads(self.process.stdout.readline())
        assert status in (0, KILLED), "the run failed; its traceback is above"
        return status, json.loads(printed) if status == 0 else None


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    made = Victim()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("floor", "best"), [(None, 2), (-1.0, 1)], ids=["to the target", "to the floor"])
def test_killed_at_planted_moments(victim, tmp_path, floor, best, every):
    """Before each call of the user's functions, of the cut, and of everything that touches the disk."""
    status, whole = victim(tmp_path / "whole", floor=floor)
    assert status == 0
    assert whole["result"][1] == best
    assert whole["events"] > 15
    resumed_by = set()
    before_the_floor = 0 if floor is None else whole["events"] * 2 // 3  # there it is the same as without one
    for event in range(before_the_floor + 1, whole["events"] + 1, every):
        folder = tmp_path / str(event)
        status, _ = victim(folder, floor=floor, event=event)
        assert status == KILLED
        status, found = victim(folder, floor=floor)
        assert status == 0
        assert found["result"] == whole["result"], f"killed at event {event}"
        assert sorted(p.name for p in folder.iterdir()) == [f"round-{best:03}.safetensors", "state.json"]
        resumed_by.add(found["events"])
    assert min(resumed_by) < whole["events"] / 2  # the late ones did go on from where they were, not from the start


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_killed_at_random_again_and_again(victim, tmp_path, seed):
    """At any call of any Python function, ours, torch's or the user's."""
    _, whole = victim(tmp_path / "whole", call=-1)
    draw = random.Random(seed)
    for _ in range(4):
        status, found = victim(tmp_path / "run", call=draw.randrange(1, whole["calls"] // 2))
        assert status == KILLED or found["result"] == whole["result"]
    status, found = victim(tmp_path / "run")
    assert found["result"] == whole["result"]


@pytest.mark.slow
def test_killed_from_outside_until_it_comes_through(victim, tmp_path):
    _, whole = victim(tmp_path / "whole")
    status, killed, seconds = KILLED, 0, 0.005
    while status == KILLED:
        status, found = victim(tmp_path / "run", seconds=seconds)
        killed += status == KILLED
        seconds *= 1.6
    assert killed > 0
    assert found["result"] == whole["result"]
