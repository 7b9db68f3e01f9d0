"""The check of a copy leaves the model as it is, also where the copy's hooks are the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import secateur as sec


class Watched(nn.Module):
    """A hook that keeps features and an average, in the module whose method it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.head, self.seen = nn.Linear(6, 2), dict[str, Tensor]()
        self.register_buffer("average", torch.zeros(()))

        def keep(_module: nn.Module, _args: Any, out: Tensor) -> None:
            self.seen["hidden"] = out
            self.average.mul_(0.9).add_(out.detach().mean(), alpha=0.1)

        self.body[0].register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def test_a_cut_leaves_nothing_in_what_hooks_write_to() -> None:
    model = Watched().eval()
    sec.apply(model, sec.plan(sec.trace(model, torch.randn(3, 4)), sec.Ratio(0.5)))
    assert model.body[0].out_features == 4
    assert not model.seen
    assert not model.average
