"""A cut model goes to ONNX like any other, and computes there what it computes here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torchvision.models import mobilenet_v2

import secateur as sec


@pytest.mark.parametrize("make", [mobilenet_v2], ids=lambda make: make.__name__)
def test_onnx(make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = make().eval(), torch.randn(1, 3, 64, 64)
    sec.apply(model, sec.plan(sec.trace(model, example), sec.Ratio(0.5)))
    path = tmp_path / "cut.onnx"
    torch.onnx.export(model, (example,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    with torch.no_grad():
        want = model(example).numpy()
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
