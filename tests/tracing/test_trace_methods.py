"""Which methods beside forward `trace` calls: such as do nothing but compute, by their source."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import secateur as sec

DONE: list[str] = []


def note(what: str) -> None:
    DONE.append(what)


class Methods(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.a, self.b, self.folder = nn.Linear(4, 8), nn.Linear(8, 3), folder

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def computes(self, x: Tensor) -> Tensor:
        return torch.cat(self._halves(x), 1).view(len(x), -1)

    def _halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x).chunk(2, 1)

    def writes(self, x: Tensor) -> Tensor:
        torch.save(x, self.folder / "x.pt")
        return self.a(x).chunk(2, 1)[0]

    def writes_further_on(self, x: Tensor) -> Tensor:
        return self._written(self.a(x)).chunk(2, 1)[0]

    def _written(self, x: Tensor) -> Tensor:
        (self.folder / "y").write_text("here")
        return x

    def tells(self, x: Tensor) -> Tensor:
        note("told")
        return self.a(x).chunk(2, 1)[0]


def test_what_may_do_more_than_compute_is_told_and_not_called(tmp_path: Path) -> None:
    graph = sec.trace(Methods(tmp_path), torch.randn(2, 4))
    assert not list(tmp_path.iterdir())
    assert not DONE
    told = {one.what.split()[1].removeprefix("Methods.") for one in graph.unseen}
    assert told == {"writes", "writes_further_on", "tells"}
    assert all(one.where.startswith("test_trace_methods.py:") for one in graph.unseen)
    assert [axis.size for axis in graph.axes] == [4, 4]  # the halves that `computes` takes
