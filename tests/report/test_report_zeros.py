"""The picture of where zeros are: what is drawn is what is zero."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import secateur as sec
from secateur import prune
from secateur.report import ReportError, write_zeros
from secateur.report.zero_map import density, weights_of


def test_cells_are_shares_of_what_is_not_zero() -> None:
    weight = torch.ones(128, 4, 3, 3)
    weight[:64] = 0
    weight[64:, 1] = 0
    shares = density(weight, most=4)
    assert shares.shape == (4, 4)
    assert not shares[:2].any()
    assert shares[2:].tolist() == [[1.0, 0.0, 1.0, 1.0]] * 2


def test_the_picture_shows_the_half_that_is_gone(tmp_path: Path) -> None:
    whole, half = (tmp_path / name for name in ("whole.png", "half.png"))
    net = nn.Linear(64, 64)
    net.weight.data[0, 0] = 0
    write_zeros(net, whole)
    net.weight.data[:32] = 0
    write_zeros(net, half)
    gone = {path: _share(path, (213, 94, 0)) for path in (whole, half)}
    assert gone[whole] < 0.02
    assert 0.3 < gone[half] < 0.5  # half of the panel, which fills most of the picture


def _share(path: Path, colour: tuple[int, int, int]) -> float:
    with Image.open(path) as image:
        assert image.width == 1800
        pixels = torch.from_numpy(np.asarray(image.convert("RGB")).astype(int)).view(-1, 3)
    return float(((pixels - torch.tensor(colour)).abs().sum(1) < 40).float().mean())


def test_many_weights_and_masks(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    sec.sparsify(net, [torch.randn(16, 8)], sec.NM(2, 4), masks=True)
    with torch.no_grad():
        net[3].weight_orig.fill_(1)  # what training may do: the mask still says what is zero
    assert int((weights_of(net)["3.weight"] == 0).sum()) == 32
    write_zeros(net, tmp_path / "zeros.png", dark=True)
    for module in net[:-1]:
        prune.remove(module, "weight")
    assert int((weights_of(net)["3.weight"] == 0).sum()) == 32


def test_without_zeros_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no weight of the model has a zero"):
        write_zeros(nn.Linear(4, 4), tmp_path / "zeros.png")
    assert not (tmp_path / "zeros.png").exists()
