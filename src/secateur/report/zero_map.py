"""Where the zeros of a model's weights are, as a picture."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from secateur.report.png import Tones, drawn, short
from secateur.report.story import ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_MOST = 24  # weights that are drawn
_GRID = 64  # cells of a weight along each side, at most


def write_zeros(model: nn.Module, path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Draw where the zeros are, weight by weight: outputs down, inputs across, as a picture 1800 pixels wide.

    >>> import tempfile
    >>> net = nn.Linear(8, 8)
    >>> _ = net.weight.data[:4].zero_()
    >>> path = f"{tempfile.mkdtemp()}/zeros.png"
    >>> write_zeros(net, path)
    >>> open(path, "rb").read(4)
    b'\\x89PNG'

    The colour of a cell is the share of its weights that are not zero. Of more than 24 weights with zeros, that many
    are drawn, spread evenly over the model. Needs matplotlib.
    """
    weights = {name: weight for name, weight in weights_of(model).items() if not bool(weight.all())}
    if not weights:
        raise ReportError("there is nothing to draw: no weight of the model has a zero; sparsify makes some")
    drawn(path, partial(_draw, weights), dark=dark)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All matrices and kernels that a model computes with, masks of `secateur.prune` multiplied in.

    >>> from secateur import prune
    >>> layer = prune.l1_unstructured(nn.Linear(2, 2), "weight", amount=3)
    >>> {name: int((weight != 0).sum()) for name, weight in weights_of(layer).items()}
    {'weight': 1}
    """
    found = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    for name, mask in model.named_buffers():
        orig = f"{name.removesuffix('_mask')}_orig"
        if name.endswith("_mask") and orig in found:
            found[name.removesuffix("_mask")] = found.pop(orig) * mask
    return found


def density(weight: Tensor, most: int = _GRID) -> Tensor:
    """The share of weights that are not zero, over a grid of outputs by inputs.

    >>> import torch
    >>> density(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), most=1)
    tensor([[0.7500]])
    """
    there = (weight != 0).flatten(1).float()
    sizes = min(most, there.shape[0]), min(most, there.shape[1])
    return F.adaptive_avg_pool2d(there.unsqueeze(0), sizes)[0].cpu()


def _draw(weights: dict[str, Tensor], canvas: Canvas, tones: Tones) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    names = list(weights)
    chosen = [names[i * len(names) // min(_MOST, len(names))] for i in range(min(_MOST, len(names)))]
    scale = LinearSegmentedColormap.from_list("kept", [tones["gone"], tones["before"], tones["kept"]])
    wide = min(6, len(chosen))
    places = list(canvas.subplots(-(-len(chosen) // wide), wide, squeeze=False).flat)
    for axes in places:
        axes.set_axis_off()
    for axes, name in zip(places, chosen, strict=False):
        shares = density(weights[name]).numpy()
        seen = axes.imshow(shares, cmap=scale, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        zeros = float((weights[name] == 0).double().mean())
        axes.set_title(f"{short(name, 26)}\n{zeros:.1%} zeros", fontsize=7, family="monospace")
    bar = canvas.colorbar(seen, ax=canvas.axes, fraction=0.02, pad=0.01, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["all zero", "half", "none zero"])
    more = f"; {len(chosen)} of {len(names)} are shown" if len(names) > len(chosen) else ""
    canvas.suptitle(f"Where the zeros are: outputs down, inputs across{more}", x=0.012, ha="left", fontsize=10.5)
