"""Ultralytics' own training and export with a cut network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import secateur as sec

pytestmark = pytest.mark.ecosystem


@pytest.fixture
def yolo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    ultralytics = pytest.importorskip("ultralytics")
    monkeypatch.chdir(tmp_path)
    made = ultralytics.YOLO("yolov8n.yaml")
    net, image = made.model.eval(), torch.rand(1, 3, 64, 64)
    sec.apply(net, sec.plan(sec.trace(net, image), sec.Ratio(0.5)))
    return made


def pictures(folder: Path) -> Path:
    """Four images with a box each, as ultralytics reads them."""
    import cv2

    (folder / "images").mkdir()
    (folder / "labels").mkdir()
    for i in range(4):
        cv2.imwrite(
            str(folder / "images" / f"{i}.png"), np.random.default_rng(i).integers(0, 255, (64, 64, 3), np.uint8)
        )
        (folder / "labels" / f"{i}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    names = "\n".join(f"  {i}: thing{i}" for i in range(80))
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images\nval: images\nnames:\n{names}\n")
    return data


def test_the_trainer_of_the_page_trains_the_cut_network(yolo: Any, tmp_path: Path) -> None:
    from ultralytics.models.yolo.detect import DetectionTrainer

    net: nn.Module = yolo.model
    small = {name: tuple(p.shape) for name, p in net.named_parameters()}
    start = {name: p.detach().clone() for name, p in net.named_parameters()}

    class CutTrainer(DetectionTrainer):
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
            return net.train().requires_grad_(True)

    options = {"epochs": 1, "imgsz": 64, "batch": 2, "device": "cpu", "workers": 0, "plots": False, "val": False}
    yolo.train(data=str(pictures(tmp_path)), trainer=CutTrainer, project=str(tmp_path), verbose=False, **options)
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == small
    assert any(not torch.equal(p, start[name]) for name, p in net.named_parameters())


def test_export(yolo: Any) -> None:
    """With what its own blocks say of their widths: a stale one makes the exporter fail."""
    import onnxruntime

    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        want = yolo.model(image)[0]
    path = yolo.export(format="onnx", imgsz=64, simplify=False, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    assert np.abs(got - want.numpy()).max() < 1e-3 * want.abs().max()
