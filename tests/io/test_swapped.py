"""Arguments the wrong way round are refused in words."""

import pytest
from torch import nn

import secateur as sec


def test_swapped_arguments(tmp_path):
    net, path = nn.Linear(2, 2), tmp_path / "file"
    with pytest.raises(sec.FileError, match=r"it is save\(model, path\): got a str as the model and a Linear as the p"):
        sec.save(str(path), net)
    sec.save(net, path)
    with pytest.raises(
        sec.FileError, match=r"it is load\(path, model\): got a \w*Path as the model and a Linear as the"
    ):
        sec.load(net, path)
