"""The demo: real training, the same every time, and what it writes."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import secateur as sec
from secateur.cli import main
from secateur.cli.exits import Exit
from secateur.demo import DemoOutcome, Stage, run
from secateur.demo.data import DemoError, digits, fashion_mnist
from secateur.demo.nets import ResidualNet, RowLSTM


def measured(outcome: DemoOutcome) -> list[Stage]:
    """All but the clock."""
    return [replace(stage, seconds=0.0) for stage in outcome.stages]


@pytest.fixture(scope="module")
def whole() -> tuple[DemoOutcome, ...]:
    return run()


def test_the_job(whole: tuple[DemoOutcome, ...]) -> None:
    """Both learn, both are cut to half of the MACs, both are as good again after recovery."""
    assert [outcome.name for outcome in whole] == ["residual net", "LSTM"]
    for outcome in whole:
        before, cut, recovered = outcome.stages
        assert before.accuracy > 0.95
        assert recovered.accuracy > before.accuracy - 0.02
        assert recovered.accuracy > 0.95
        assert cut.macs <= before.macs / 2
        assert cut.macs == recovered.macs == outcome.plan.macs.after
        assert cut.params == recovered.params == outcome.plan.params.after
        assert cut.file_bytes == recovered.file_bytes < 0.7 * before.file_bytes
        assert all(stage.seconds > 0 for stage in outcome.stages)
        assert cut.seconds < before.seconds


def test_the_sweep_is_of_accuracy(whole: tuple[DemoOutcome, ...]) -> None:
    for outcome in whole:
        assert outcome.sweep.metric == "accuracy"
        assert outcome.sweep.whole == outcome.stages[0].accuracy
        assert outcome.sweep.curve[-1].metric < outcome.sweep.whole


@pytest.mark.slow  # two whole demos
def test_deterministic_and_seeded() -> None:
    state = torch.get_rng_state()
    one, two = run(1, quick=True), run(1, quick=True)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one, two, strict=True):
        assert measured(a) == measured(b)
        assert a.plan == b.plan
        assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[tuple[DemoOutcome, ...]] = []
    monkeypatch.setattr("secateur.cli.demo.run_demo", lambda *args, **given: ran.append(run(*args, **given)) or ran[0])
    assert main(["demo", "--quick", "--json"]) == Exit.DONE
    said = json.loads(capsys.readouterr().out)
    assert [network["name"] for network in said["networks"]] == ["residual net", "LSTM"]
    assert [(trip["opened_with"], trip["same"]) for trip in said["round_trips"]] == [
        ("from_pretrained", True),
        ("secateur.load", True),
    ]
    assert all(trip["params"][1] <= 0.7 * trip["params"][0] for trip in said["round_trips"])
    assert [bool(trip["fields"]) for trip in said["round_trips"]] == [True, False]
    ends = ("html", "json", "png", "safetensors")
    names = sorted(f"{name}.{end}" for name in ("residual-net", "lstm") for end in ends)
    assert sorted(file.name for file in Path("secateur-demo").iterdir()) == names
    for name, fresh in (("residual-net", ResidualNet()), ("lstm", RowLSTM(8))):
        plan = sec.Plan.from_json(Path("secateur-demo", f"{name}.json").read_text())
        sec.load(Path("secateur-demo", f"{name}.safetensors"), fresh)
        assert sum(p.numel() for p in fresh.parameters()) == plan.params.after
    assert "after recovery" in Path("secateur-demo/lstm.html").read_text(encoding="utf-8")

    monkeypatch.setattr("secateur.cli.demo.run_demo", lambda *_, **__: ran[0])  # the same again
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    assert main(["demo", "--quick"]) == Exit.DONE  # its own results it replaces
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["accuracy", "parameters", "MACs", "file", "latency"]
    assert [line.partition("  ")[0] for line in lines[1:4]] == [
        f"residual net, {stage}" for stage in ("before", "after the cut", "after recovery")
    ]
    assert "  secateur-demo/residual-net.html" in lines
    note = "a cut language model, saved and opened again, needs transformers, which is not installed"
    assert any(line.startswith(note) for line in lines)
    assert main(["demo", "--quick", "--out", "secateur-demo"]) == Exit.WRITE  # those in a named folder not


def test_wrong_names(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--data", "digit"]) == Exit.USAGE
    assert "did you mean digits?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_digits() -> None:
    one, two, other = digits(0), digits(0), digits(1)
    assert torch.equal(one.test[0], two.test[0])
    assert not torch.equal(one.test[0], other.test[0])
    assert float(one.train[0].min()) == 0.0
    assert float(one.train[0].max()) == 1.0
    assert one.train[1].bincount().min() > 80  # of each of ten digits


def write_idx(path: Path, array: np.ndarray, kind: int = 8) -> None:
    head = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


def fashion(folder: Path) -> None:
    for name, count in (("train", 30), ("t10k", 10)):
        pictures = np.full((count, 28, 28), 255, np.uint8) * (np.arange(count) % 2).astype(np.uint8)[:, None, None]
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", pictures)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", (np.arange(count) % 2).astype(np.uint8))


def test_fashion_mnist(tmp_path: Path) -> None:
    fashion(tmp_path)
    found = fashion_mnist(0, tmp_path)
    assert (found.size, len(found.train[1]), len(found.test[1])) == (28, 30, 10)
    for pictures, labels in (found.train, found.test):
        assert torch.equal(pictures.amax((1, 2, 3)), labels.float())  # white where the label is 1


def test_fashion_mnist_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="apt-get install dataset-fashion-mnist"):
        fashion_mnist(0, tmp_path / "nowhere")
    fashion(tmp_path)
    for damage in (b"no archive", gzip.compress(b"\0\0\x08"), gzip.compress(b"\0\0\x08\x03" + bytes(30))):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(damage)
        with pytest.raises(DemoError, match="--reinstall dataset-fashion-mnist"):
            fashion_mnist(0, tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((3, 28, 28), np.uint8), kind=9)
    with pytest.raises(DemoError, match="not an array of bytes"):
        fashion_mnist(0, tmp_path)
