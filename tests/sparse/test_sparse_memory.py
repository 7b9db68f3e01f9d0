"""What `sparsify` holds at once, byte for byte: a copy of the weights, one layer's moments, one batch."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import secateur as sec
from secateur.calibrate import data, stages

WIDTH, ROWS = 128, 64
WEIGHT, MOMENTS, BATCH = 4 * WIDTH * WIDTH, 2 * 8 * WIDTH * WIDTH, 4 * ROWS * WIDTH  # bytes


def _peak(run: Callable[[], object]) -> int:
    """The most bytes of tensors that were made in a call and held at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _sparsify(depth: int, batches: int) -> int:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(depth)), nn.Linear(WIDTH, 4))

    def made() -> Iterator[Tensor]:
        return (torch.randn(ROWS, WIDTH) for _ in range(batches))

    return _peak(lambda: sec.sparsify(net, made(), sec.NM(2, 4)))


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held of batches goes into files at once."""
    monkeypatch.setattr(data, "_ROOM", BATCH)
    monkeypatch.setitem(stages.Runs.__init__.__kwdefaults__, "room", BATCH)


@pytest.mark.usefixtures("little_room")
def test_more_layers_take_the_memory_of_their_copy() -> None:
    few, many = _sparsify(3, 2), _sparsify(6, 2)
    assert few < 3 * WEIGHT + 8 * MOMENTS  # the solver works on a few matrices of that size
    assert 3 * WEIGHT <= many - few < 3 * WEIGHT + MOMENTS / 2  # all layers' moments would be three of these


@pytest.mark.usefixtures("little_room")
def test_more_batches_take_no_more_memory() -> None:
    few, many = _sparsify(1, 2), _sparsify(1, 12)
    assert many - few < BATCH  # 10 more of these were read
