"""How zeros are spread over layers, where a pattern leaves that open: more where they cost less."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import ParameterProduct, Watch, call, fisher_weights
from secateur.calibrate.blame import blamed_on_batch
from secateur.calibrate.products import Part
from secateur.prune.selection import Segment, drop_smallest

_LEFT = 0.2  # of what stays on average, what stays of every weight at least


class Spread(ABC):
    """A rule for the fraction of zeros of each weight, whose mean over all entries is what was asked for."""

    @abstractmethod
    def sparsities(self, model: nn.Module, names: Sequence[str], sparsity: float, batches: Sequence[Any]) -> Spreading:
        """The fraction for each of some parameters of a model, which is `calibrating`."""


Spreading = dict[str, float]


@dataclass(frozen=True)
class Prices(Spread):
    """One threshold for all layers on what a weight is worth: w²·E[x²] times how much its output matters.

    >>> from secateur.calibrate import calibrating
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4))
    >>> net[2].weight.data[4:] = 0  # half of it is worth nothing
    >>> with calibrating(net):
    ...     found = Prices().sparsities(net, ["1.weight", "2.weight"], 0.25, [torch.randn(64, 1, 1, 1)])
    >>> found["2.weight"] >= 0.5, round(sum(found.values()) / 2, 6)
    (True, 0.25)

    How much an output matters is the Fisher information of the model's answer (`calibrate.fisher`). Of every weight a
    fifth of the mean density stays at least. A linear layer that reads the model's own input, whose derivative torch
    does not compute, has the fraction that was asked for.
    """

    def sparsities(self, model: nn.Module, names: Sequence[str], sparsity: float, batches: Sequence[Any]) -> Spreading:
        """From one run there and back on each batch."""
        found = prices(model, names, batches)
        return {**dict.fromkeys(names, sparsity), **(cut_off(found, sparsity) if found else {})}


def prices(model: nn.Module, names: Collection[str], batches: Sequence[Any]) -> dict[str, Tensor]:
    """What each weight is worth, for each of some parameters whose outputs the derivative of the model's tells of."""
    matters = fisher_weights(model, batches)
    squares: dict[Part, Tensor] = {}
    found: dict[Part, ParameterProduct] = {}

    def take(product: ParameterProduct, run: Any) -> Any:
        if product.name in names:
            found.setdefault(product.part, product)
            for x in product.of.rows(product.of.sample(product.enough)):
                now = x.float().square().mean(1).cpu()
                squares[product.part] = squares.get(product.part, torch.zeros_like(now)) + now
        return run()

    for number, batch in enumerate(batches):
        with blamed_on_batch(number, "Prices"), Watch(model, take):
            call(model, batch)
    made: dict[str, list[Tensor]] = {}
    known = {product.name for product in found.values()} - {p.name for at, p in found.items() if at not in matters}
    for part, product in found.items():
        if product.name not in known:
            continue
        worth = product.weight.detach().float().cpu().square() * squares[part].unsqueeze(1)
        made.setdefault(product.name, []).append((worth * matters[part].float().unsqueeze(2)).flatten())
    return {name: torch.cat(parts) for name, parts in made.items()}


def cut_off(scores: Mapping[str, Tensor], sparsity: float) -> Spreading:
    """The fraction of each that goes if over all the lowest go, but not nearly all of any.

    >>> cut_off({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, 0.25)
    {'a': 0.5, 'b': 0.0}
    """
    most = 1 - _LEFT * (1 - sparsity)
    total = sum(score.numel() for score in scores.values())
    fixed: Spreading = {}
    while True:
        rest = {name: score for name, score in scores.items() if name not in fixed}
        count = round(sparsity * total - sum(share * scores[name].numel() for name, share in fixed.items()))
        masks = {name: torch.empty_like(score) for name, score in rest.items()}
        drop_smallest([Segment(score, masks[name], fresh=True) for name, score in rest.items()], count)
        shares = {name: 1 - float(mask.mean(dtype=torch.float64)) for name, mask in masks.items()}
        over = {name: most for name, share in shares.items() if share > most}
        if not over:
            return {name: {**shares, **fixed}[name] for name in scores}
        fixed |= over
