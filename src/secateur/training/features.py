"""What a cut model and the uncut one have in common inside: layers whose outputs still mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compensate.alike import KeptPositions, missed, picked, ways
from secateur.planning.plans import Plan

_MOST = 8  # layers that are compared
_ALIKE = 0.9  # a larger part of the variance that differs tells of layers that no longer mean the same


@dataclass(frozen=True)
class Correspondence:
    """Layers that are compared, each with the positions of the uncut one's output that the cut one still has."""

    layers: Mapping[str, KeptPositions | None] = field(default_factory=dict)

    def between(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Tensor | float:
        """The mean difference of all layers."""
        if not self.layers:
            return 0.0
        pairs = ((ours[name], picked(theirs[name], index)) for name, index in self.layers.items())
        return torch.stack([missed(a, b) for a, b in pairs]).mean()


@contextmanager
def layer_outputs(model: nn.Module, names: Sequence[str] | None = None) -> Iterator[dict[str, Tensor]]:
    """The outputs of some modules, or of all, in each run inside: those that are one tensor, as they were last."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1:
                found.pop(name, None)  # in the order of the last run
                found[name] = output

        return hook

    chosen = ((name, module) for name, module in model.named_modules() if name and (names is None or name in names))
    handles = [module.register_forward_hook(note(name)) for name, module in chosen]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def correspondence(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], plan: Plan | None) -> Correspondence:
    """Up to eight layers, evenly from first to last, whose outputs on the same batch are alike already.

    A cut keeps positions one to one, and the plan says which. That they still mean the same is measured, not assumed.
    """
    found: dict[str, KeptPositions | None] = {}
    seen: set[int] = set()
    for name, output in ours.items():
        if name in theirs and id(output) not in seen:
            seen.add(id(output))
            for index in ways(name, output.shape, theirs[name].shape, plan):
                if float(missed(output, picked(theirs[name], index))) < _ALIKE:
                    found[name] = index
                    break
    names = list(found)
    count = min(_MOST, len(names))
    spread = [names[(i + 1) * len(names) // count - 1] for i in range(count)]
    return Correspondence({name: found[name] for name in spread})
