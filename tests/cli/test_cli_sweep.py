"""Sweeps: by the library and by the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from command_line import Command
from torch import nn

import secateur as sec
from secateur.cli.exits import Exit
from secateur.pipeline.sweep import OutputError, sweep

EXAMPLE = torch.ones(1, 4)


def net() -> nn.Module:
    """The first hidden layer has two units that count and six that do nothing; of the second all count alike."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[0].weight[:2] = 1.0
        model[2].weight[:, :2] = 1.0
        model[4].weight[:] = 1.0
    return model


def test_sensitivity_by_hand() -> None:
    """Half of the idle layer costs nothing; half of the other halves the output."""
    found = sweep(net(), EXAMPLE, ratios=(0.5,))
    alone = {item.axis: item.point.metric for item in found.axes if item.point is not None}
    assert alone == {"0 features": 0.0, "2 features": 0.5}
    (both,) = found.curve
    assert both.metric == 0.5
    assert both.macs == pytest.approx((4 * 4 + 4 * 2 + 2 * 2) / (4 * 8 + 8 * 4 + 4 * 2))


def test_the_curve_is_that_of_plans_and_the_model_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []

    def width(small: nn.Module) -> float:
        seen.append(small)
        small.train()
        with torch.no_grad():
            small[0].weight.zero_()  # a metric may do what it likes with what it is given
        return float(small[0].out_features)

    found = sweep(model, EXAMPLE, width, ratios=(0.25, 0.5, 0.75))
    assert found.metric == "width"
    assert [point.metric for point in found.curve] == [12.0, 8.0, 4.0]
    for point in found.curve:
        plan = sec.plan(sec.trace(model, EXAMPLE), sec.Ratio(point.ratio))
        assert point.macs == plan.macs.after / plan.macs.before
        assert point.params == plan.params.after / plan.params.before
    assert model not in seen
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_axes_that_only_move_together() -> None:
    """Heads and head dims of a model that computes one from the other; every axis is measured or said to be stuck."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    found = sweep(model, torch.randn(1, 3, 16), ratios=(0.5,))
    assert [item.axis for item in found.axes] == [axis.name for axis in sec.trace(model, torch.randn(1, 3, 16)).axes]
    assert any(item.point is not None for item in found.axes)
    assert all(item.point is None or item.point.macs < 1 for item in found.axes)


def test_output_error_by_hand() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(2.0)
    metric = OutputError(layer, [torch.tensor([[3.0]]), torch.tensor([[4.0]])])
    layer.weight.data.fill_(3.0)
    assert metric(layer) == 0.5  # √((9 − 6)² + (12 − 8)²) / √(6² + 8²)
    with pytest.raises(sec.SecateurError, match="at least one batch"):
        OutputError(layer, [])


@pytest.mark.parametrize("ratios", [(0.0,), (1.0,), (0.5, 2.0)], ids=str)
def test_impossible_ratios(ratios: tuple[float, ...]) -> None:
    with pytest.raises(sec.PlanError, match="between 0 and 1"):
        sweep(net(), EXAMPLE, ratios=ratios)


def test_the_command(command: Command) -> None:
    ended = command("sweep", "net.py:pair", "--ratios", "0.25,0.5", "--json")
    assert ended.code == Exit.DONE, ended.err
    said = json.loads(ended.out)
    assert [point["ratio"] for point in said["curve"]] == [0.25, 0.5]
    assert (said["metric"], said["whole"]) == ("relative output error", 0.0)
    assert {item["axis"] for item in said["axes"]} == {"0 features", "2 features"}
    ended = command("sweep", "net.py:pair", "--ratios", "0.5")
    rows = [line.split() for line in ended.out.splitlines()]
    assert rows[1] == ["0", "100.0%", "100.0%", "0"]
    assert rows[2][0] == "0.5"


def test_a_metric_of_the_users(command: Command) -> None:
    said = json.loads(command("sweep", "net.py:pair", "--eval", "net.py:total", "--ratios", "0.5", "--json").out)
    assert said["metric"] == "total"
    assert 0 < said["curve"][0]["metric"] < said["whole"]


def test_data_of_the_users(command: Command) -> None:
    own, theirs = (
        json.loads(command("sweep", "net.py:pair", "--ratios", "0.5", "--json", *more).out)["curve"][0]["metric"]
        for more in ([], ["--data", "net.py:generated"])
    )
    assert own != theirs


def test_results_and_report(command: Command) -> None:
    words = ("sweep", "net.py:pair", "--ratios", "0.5", "--out", "out", "--report")
    assert command(*words, "-q").code == Exit.DONE
    assert sorted(command.files()) == ["out/report.html", "out/report.png", "out/sweep.json"]
    assert json.loads(Path("out/sweep.json").read_text())["metric"] == "relative output error"
    assert command(*words).code == Exit.WRITE


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--ratios", "0.5,x"], Exit.USAGE, "give numbers, as in"),
        (["--ratios", "0,0.5"], Exit.USAGE, "between 0 and 1"),
        (["--report"], Exit.USAGE, "say where it goes with --out"),
        (["--eval", "net.py:totl"], Exit.USAGE, "did you mean total"),
        (["--eval", "net.py:number"], Exit.USAGE, "not a function"),
        (["--eval", "net.py:text"], Exit.INPUT, "the metric text returned 'good'; return one number"),
        (["--eval", "net.py:nan"], Exit.INPUT, "the metric nan returned nan; return a finite number"),
        (["--eval", "net.py:fails"], Exit.INPUT, "net.py:fails raised TypeError"),
        (["--data", "net.py:pairs"], Exit.INPUT, "could not be run on batch 1"),
    ],
    ids=range(9),
)
def test_what_is_refused(command: Command, words: list[str], code: Exit, message: str) -> None:
    ended = command("sweep", "net.py:pair", *words)
    assert ended.code == code
    assert message in ended.error


# budgets and compensation ---------------------------------------------------------------------------------------


def test_a_curve_over_budgets(command: Command) -> None:
    ended = command("sweep", "net.py:pair", "--macs", "0.8,0.6,0.4", "--json")
    assert ended.code == Exit.DONE, ended.err
    said = json.loads(ended.out)
    assert [point["target"] for point in said["curve"]] == ["Macs(0.8)", "Macs(0.6)", "Macs(0.4)"]
    assert [point["ratio"] for point in said["curve"]] == [None] * 3
    assert all(point["macs"] <= f for point, f in zip(said["curve"], (0.8, 0.6, 0.4), strict=True))
    assert len(said["axes"]) == 2
    rows = [line.split() for line in command("sweep", "net.py:pair", "--macs", "0.8,0.6").out.splitlines()]
    assert rows[0][0] == "target"
    assert rows[1] == ["100.0%", "100.0%", "0"]
    assert [row[0] for row in rows[2:4]] == ["Macs(0.8)", "Macs(0.6)"]


def test_budgets_given_together_hold_together(command: Command) -> None:
    said = json.loads(command("sweep", "net.py:pair", "--macs", "0.8,0.5", "--bytes", "0.9,0.7", "--json").out)
    assert [point["target"] for point in said["curve"]] == ["Macs(0.8) & Bytes(0.9)", "Macs(0.5) & Bytes(0.7)"]


def test_the_curve_alone(command: Command) -> None:
    words = ("sweep", "net.py:pair", "--params", "0.7,0.5", "--no-axes")
    assert json.loads(command(*words, "--json").out)["axes"] == []
    assert "axis alone" not in command(*words).out
    assert command(*words, "--out", "out", "--report", "-q").code == Exit.DONE
    assert sorted(command.files()) == ["out/report.html", "out/report.png", "out/sweep.json"]


def test_compensated_as_the_library_does(command: Command) -> None:
    data = ("--data", "net.py:examples")
    words = ("sweep", "net.py:pair", "--macs", "0.6,0.4", *data, "--importance", "reconstruction", "--json")
    plain, refitted = (json.loads(command(*words, *more).out)["curve"] for more in ([], ["--compensate"]))
    net = runpy.run_path("net.py")
    made = sweep(*net["pair"](), targets=[sec.Macs(0.6), sec.Macs(0.4)], batches=net["examples"]())
    assert refitted == list(made.to_data()["curve"])
    for before, after in zip(plain, refitted, strict=True):
        assert before["macs"] == after["macs"]
        assert after["metric"] < before["metric"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--macs", "0.5,x"], Exit.USAGE, "--macs: Macs takes a fraction above 0, at most 1, or a number"),
        (["--macs", ""], Exit.USAGE, "Macs takes a fraction above 0"),
        (["--macs", "0.5,1.5"], Exit.USAGE, "which could be a percentage: for 1.5% write Macs(0.015)"),
        (["--macs", "0.5", "--ratios", "0.5"], Exit.USAGE, "--ratios decides by itself; give it without --macs"),
        (["--macs", "0.5,0.4", "--params", "0.5"], Exit.USAGE, "--macs and --params hold together"),
        (["--macs", "0.5,0.001"], Exit.TARGET, "Macs(0.001) cannot be reached: the lowest is"),
        (["--compensate"], Exit.USAGE, "--compensate looks at data; give it with --data"),
        (
            ["--compensate", "--data", "net.py:pairs", "--loss", "net.py:loss", "--eval", "net.py:total"],
            Exit.USAGE,
            "no examples to refit layers on",
        ),
    ],
    ids=range(8),
)
def test_budgets_that_are_refused(command: Command, words: list[str], code: Exit, message: str) -> None:
    ended = command("sweep", "net.py:pair", *words)
    assert ended.code == code
    assert message in ended.error
