"""The scale of a batch norm, as in network slimming."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context, gather
from secateur.importance.magnitude import Magnitude


@dataclass(frozen=True)
class BNScale(Criterion):
    """The absolute scale that norms give to a position; its weights' magnitude where there is no norm.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 1, 1))
    >>> net[1].weight.data = torch.tensor([0.1, -2.0, 1.0])
    >>> sec.plan(sec.trace(net, torch.zeros(1, 1, 4, 4)), sec.Ratio(0.4), importance=sec.BNScale()).axes[0].keep
    (1, 2)
    """

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        scales = {
            site.tensor: context.parameters[site.tensor]
            for site in context.axis.sites
            if site.tensor in context.norms and site.tensor in context.parameters
        }
        if not scales:
            return Magnitude()(context)
        return gather(replace(context, parameters=scales), _scale)


def _scale(weight: Tensor, _: int) -> Tensor:
    return weight.detach().abs()
