"""Recurrent layers whose gates mask different hidden units."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

GATES = {"LSTM": 4, "GRU": 3}


@dataclass(frozen=True)
class RecurrentLayer:
    """One direction of one layer of a recurrent module, with row masks on both of its matrices."""

    name: str  # of the module
    module: nn.RNNBase
    suffix: str

    def matrices(self) -> tuple[str, str]:
        """The names of both matrices in the model."""
        return tuple(f"{self.name}.weight_{part}{self.suffix}".lstrip(".") for part in ("ih", "hh"))  # type: ignore[return-value]


def suffixes(module: nn.RNNBase) -> list[str]:
    """What the names of a recurrent module's tensors end with, for each layer in each direction.

    >>> suffixes(nn.LSTM(1, 2, bidirectional=True))
    ['_l0', '_l0_reverse']
    """
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"_l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


def masked_layers(model: nn.Module, masks: Mapping[str, Tensor]) -> list[RecurrentLayer]:
    """The recurrent layers of a model of which both matrices have a row mask."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            layers = (RecurrentLayer(name, module, suffix) for suffix in suffixes(module))
            found += [layer for layer in layers if all(matrix in masks for matrix in layer.matrices())]
    return found


def align(layer: RecurrentLayer, masks: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """
    >>> lstm = nn.LSTM(1, 2)
    >>> masks = {"weight_ih_l0": torch.tensor([1, 0] * 4).bool(), "weight_hh_l0": torch.tensor([0, 1] * 4).bool()}
    >>> before = lstm.weight_ih_l0[0].item()
    >>> align(masked_layers(lstm, masks)[0], masks)["weight_ih_l0"]
    tensor([False,  True, False,  True, False,  True, False,  True])
    >>> lstm.weight_ih_l0[1].item() == before
    True

    Move the rows that each gate keeps to the units that the last gate of the hidden-to-hidden matrix keeps, in
    order; the columns of the hidden-to-hidden matrix move with the rows of their gate. Returns the masks as
    they are then, or None, with nothing moved, where the gates keep different numbers of rows or agree already.
    """
    gates = GATES.get(layer.module.mode, 1)
    apart = {part: masks[name].view(gates, -1) for part, name in zip(("ih", "hh"), layer.matrices(), strict=True)}
    units = apart["hh"][-1]
    every = torch.cat(list(apart.values()))
    if bool((every == units).all()) or not bool((every.sum(1) == units.sum()).all()):
        return None
    place = _kept_first(units).argsort()
    for part, kept in apart.items():
        moves = torch.stack([_kept_first(gate)[place] for gate in kept])
        for kind in ("weight", "bias"):
            parameter = layer.module._parameters.get(f"{kind}_{part}{layer.suffix}")
            if parameter is not None:
                square = (kind, part) == ("weight", "hh") and parameter.shape[1] == len(units)
                parameter.data = _moved(parameter.data, moves.to(parameter.device), square)
    return {name: units.repeat(gates) for name in layer.matrices()}


def _kept_first(kept: Tensor) -> Tensor:
    return torch.argsort((~kept).to(torch.int8), stable=True)


def _moved(data: Tensor, moves: Tensor, square: bool) -> Tensor:
    blocks = zip(data.unflatten(0, moves.shape), moves, strict=True)
    return torch.cat([block[move][:, move] if square else block[move] for block, move in blocks])
