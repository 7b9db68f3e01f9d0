"""`secateur prune`: what it writes is the cut model, and what it says is so."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from command_line import NET, Command
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.cli import prune
from secateur.cli.exits import Exit
from secateur.cli.program import parser
from secateur.timing import Latency

PAIR = ("prune", "net.py:pair")


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def test_a_real_model(command: Command) -> None:
    """The saved model is the one that the library makes, and loads into a fresh one."""
    ended = command("prune", "timm:test_resnet", "--macs", "0.5", "--out", "out", "--json")
    assert ended.code == Exit.DONE, ended.err
    said = json.loads(ended.out)
    assert said["macs"]["after"] <= said["macs"]["before"] / 2
    assert said["verified"]
    assert sorted(said["files"]) == ["model.safetensors", "plan.json"]
    assert {name: Path("out", name).stat().st_size for name in said["files"]} == said["files"]

    model = timm.create_model("test_resnet").eval()
    sec.load("out/model.safetensors", model)
    example = torch.randn(1, 3, 160, 160)
    assert sum(p.numel() for p in model.parameters()) == said["params"]["after"]
    assert sec.macs(model, example) == said["macs"]["after"]
    plan = sec.Plan.from_json(Path("out/plan.json").read_text())
    assert (plan.macs.after, plan.params.after) == (said["macs"]["after"], said["params"]["after"])


@pytest.mark.parametrize(("option", "target"), [("macs", sec.Macs), ("params", sec.Params), ("ratio", sec.Ratio)])
def test_targets(command: Command, option: str, target: type) -> None:
    assert command(*PAIR, f"--{option}", "0.4", "--out", "out").code == Exit.DONE
    plan = sec.Plan.from_json(Path("out/plan.json").read_text())
    assert plan == sec.plan(sec.trace(built(), torch.ones(1, 4)), target(0.4))


@pytest.mark.parametrize(
    ("words", "importance"),
    [
        (["magnitude"], sec.Magnitude()),
        (["l1"], sec.Magnitude(p=1)),
        (["fpgm"], sec.FPGM()),
        (["random", "--seed", "5"], sec.Random(5)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_importance(command: Command, words: list[str], importance: object) -> None:
    assert command(*PAIR, "--ratio", "0.5", "--out", "out", "--importance", *words).code == Exit.DONE
    plan = sec.Plan.from_json(Path("out/plan.json").read_text())
    assert plan == sec.plan(sec.trace(built(), torch.ones(1, 4)), sec.Ratio(0.5), importance=importance)


@pytest.mark.parametrize("name", ["lamp", "bn", "activation", "wanda", "taylor", "hessian"])
def test_importance_with_data(command: Command, name: str) -> None:
    data = {
        "activation": ["--data", "net.py:generated"],
        "wanda": ["--data", "net.py:examples"],
        "taylor": ["--data", "net.py:pairs", "--loss", "net.py:loss"],
        "hessian": ["--data", "net.py:pairs", "--loss", "net.py:loss"],
    }
    ended = command(*PAIR, "--ratio", "0.5", "--out", "out", "--importance", name, *data.get(name, []))
    assert ended.code == Exit.DONE, ended.err


def test_several_budgets(command: Command) -> None:
    words = ("--macs", "0.6", "--params", "0.4", "--bytes", "0.5", "--out", "out", "--json")
    said = json.loads(command(*PAIR, *words).out)
    for cost, fraction in (("macs", 0.6), ("params", 0.4), ("bytes", 0.5)):
        assert said[cost]["after"] <= fraction * said[cost]["before"]
    assert said["macs"]["after"] > 0


def test_budgets_with_units(command: Command) -> None:
    said = json.loads(command(*PAIR, "--params", "0.15k", "--out", "out", "--json").out)
    assert 100 < said["params"]["after"] <= 150 < said["params"]["before"]


def test_the_time_that_was_measured_is_shown(command: Command) -> None:
    Path("wide.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def wide():\n    net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))\n"
        "    return net, torch.ones(64, 256)\n"
    )
    ended = command("prune", "wide.py:wide", "--latency", "0.5", "--out", "out")
    assert ended.code == Exit.DONE, ended.err
    assert re.search(r"measured: [\d.]+ .?s → [\d.]+ .?s \([\d.]+%\), asked for 50.0%", ended.out)
    again = json.loads(command("prune", "wide.py:wide", "--latency", "20s", "--out", "all", "--json").out)
    assert again["latency"]["asked"] == again["latency"]["ratio"] == 1.0


def test_weights_keep_their_type_and_dtype_gives_another(command: Command) -> None:
    Path("half.py").write_text(
        NET.replace("build(), torch.ones(1, 4)", "build().bfloat16(), torch.ones(1, 4).bfloat16()")
    )
    for model, words, dtype in (("half.py:pair", (), "BF16"), ("net.py:pair", ("--dtype", "float16"), "F16")):
        ended = command("prune", model, "--ratio", "0.5", "--out", "out", "--force", "--device", "cpu", *words)
        assert ended.code == Exit.DONE, ended.err
        shown = json.loads(command("show", "out/model.safetensors", "--json").out)
        assert {tensor["dtype"] for tensor in shown["tensors"].values()} == {dtype}


def test_data_goes_where_the_model_is(command: Command) -> None:
    words = ("--importance", "activation", "--data", "net.py:generated", "--dtype", "float64", "--out", "out")
    assert command(*PAIR, "--ratio", "0.5", *words).code == Exit.DONE


def test_version(command: Command) -> None:
    ended = command("--version")
    assert (ended.code, ended.out) == (Exit.DONE, f"secateur {version('secateur')}\n")


def test_latency_is_a_target() -> None:
    args = parser().parse_args(["prune", "net.py:pair", "--latency", "0.7", "--macs", "0.9"])
    assert prune._target(args) == ("macs", sec.Macs(0.9) & Latency(0.7))


def test_compensation(command: Command) -> None:
    """Least squares on data brings the outputs nearer than the bare cut does."""
    errors = []
    model, example = built(), torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
    Path("data.py").write_text(
        "import torch\nbatches = lambda: [torch.randn(64, 4, generator=torch.Generator().manual_seed(3))]\n"
    )
    for out, more in (("bare", []), ("mended", ["--compensate", "--data", "data.py:batches"])):
        ended = command(*PAIR, "--ratio", "0.5", "--out", out, *more)
        assert ended.code == Exit.DONE, ended.err
        small = sec.load(f"{out}/model.safetensors", built())
        with torch.no_grad():
            errors.append(float((small(example) - model(example)).norm()))
    assert errors[1] < 0.9 * errors[0]


def test_protect_exact_and_rounding(command: Command) -> None:
    ended = command(*PAIR, "--ratio", "0.6", "--protect", "0.*", "--round-to", "4", "--out", "out", "--json")
    assert [(axis["name"], axis["kept"]) for axis in json.loads(ended.out)["axes"]] == [("2 features", 4)]
    vit = command("prune", "timm:test_vit", "--ratio", "0.5", "--exact", "--out", "exact", "--json")
    assert all(axis["exact"] for axis in json.loads(vit.out)["axes"])


def test_weights(command: Command) -> None:
    """Given weights are those that are cut; a model that is cut already is cut on."""
    model = built()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[3:7] = 1.0
    save_file(model.state_dict(), "full.safetensors")
    ended = command(
        *PAIR, "--ratio", "0.75", "--weights", "full.safetensors", "--out", "once", "--protect", "2 features"
    )
    assert ended.code == Exit.DONE, ended.err
    assert sec.Plan.from_json(Path("once/plan.json").read_text()) == sec.plan(
        sec.trace(model, torch.ones(1, 4)), sec.Ratio(0.75), protect=("2 features",)
    )
    again = command(*PAIR, "--ratio", "0.5", "--weights", "once/model.safetensors", "--out", "twice")
    assert again.code == Exit.DONE, again.err
    twice = sec.load("twice/model.safetensors", built())
    assert [layer.out_features for layer in twice if isinstance(layer, nn.Linear)] == [2, 4, 2]


def test_weights_that_do_not_fit(command: Command) -> None:
    state = built().state_dict()
    cases = {
        "it lacks 4.bias (1 in all)": {name: t for name, t in state.items() if name != "4.bias"},
        "the model lacks other (1 in all)": {**state, "other": torch.ones(1)},
        "0.weight is [2, 4] in the file, [16, 4] in the model": {**state, "0.weight": torch.ones(2, 4)},
    }
    for words, tensors in cases.items():
        save_file(tensors, "wrong.safetensors")
        ended = command(*PAIR, "--ratio", "0.5", "--weights", "wrong.safetensors")
        assert ended.code == Exit.INPUT
        assert words in ended.error
    Path("broken.safetensors").write_bytes(b"nonsense")
    ended = command(*PAIR, "--ratio", "0.5", "--weights", "broken.safetensors")
    assert (ended.code, "broken.safetensors" in ended.error) == (Exit.INPUT, True)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.CKPT"])
def test_a_pickle_is_refused_with_the_line_that_converts_it(command: Command, name: str) -> None:
    torch.save(built().state_dict(), name)
    ended = command(*PAIR, "--ratio", "0.5", "--weights", name)
    assert ended.code == Exit.USAGE
    line = ended.error.partition('python -c "')[2].removesuffix('"')
    exec(line)
    converted = Path(name).with_suffix(".safetensors")
    assert command(*PAIR, "--ratio", "0.5", "--weights", converted, "--out", "out").code == Exit.DONE


def test_onnx(command: Command) -> None:
    ended = command("prune", "timm:test_resnet", "--ratio", "0.5", "--onnx", "--out", "out", "--json")
    assert ended.code == Exit.DONE, ended.err
    assert json.loads(ended.out)["onnx_difference"] < 1e-4
    model = sec.load("out/model.safetensors", timm.create_model("test_resnet").eval())
    session = onnxruntime.InferenceSession("out/model.onnx", providers=["CPUExecutionProvider"])
    example = torch.randn(1, 3, 160, 160)
    (got,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, model(example).numpy(), atol=1e-4)


def test_report(command: Command) -> None:
    ended = command(*PAIR, "--ratio", "0.5", "--report", "--out", "out")
    assert ended.code == Exit.DONE, ended.err
    assert "<html" in Path("out/report.html").read_text(encoding="utf-8")[:500]
    assert Path("out/report.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_person_sees(command: Command) -> None:
    ended = command(*PAIR, "--macs", "0.5")
    lines = ended.out.splitlines()
    assert lines[0].split() == ["pair", "before", "after", "left"]
    plan = sec.plan(sec.trace(built(), torch.ones(1, 4)), sec.Macs(0.5))
    assert lines[1].split() == ["MACs", "208", str(plan.macs.after), f"{plan.macs.after / 208:.1%}"]
    assert f"{len(plan.axes)} of 2 axes cut; verified against the full-size model" in lines
    assert any(line.startswith("pair-pruned/model.safetensors  ") for line in lines)
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


def test_quiet(command: Command) -> None:
    ended = command("prune", "timm:test_resnet", "--ratio", "0.5", "--out", "out", "--quiet")
    assert (ended.code, ended.out, ended.err) == (Exit.DONE, "", "")
    noisy = command("prune", "timm:test_resnet", "--ratio", "0.5", "--out", "noisy")
    assert noisy.err == "note: test_resnet has random weights; give its own with --weights FILE or --pretrained\n"


def test_the_same_command_writes_the_same_bytes(command: Command) -> None:
    for out in ("one", "two"):
        assert command("prune", "timm:test_resnet", "--ratio", "0.5", "--out", out, "-q").code == Exit.DONE
    for name in ("model.safetensors", "plan.json"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_a_target_that_cannot_be_reached(command: Command) -> None:
    """The lowest that can be, and what blocks."""
    ended = command("prune", "timm:test_resnet", "--params", "0.001", "--out", "out")
    assert ended.code == Exit.TARGET
    lines = ended.err.splitlines()
    assert "Params(0.001) cannot be reached: the lowest is 0.0" in lines[-1]
    assert "most of what stays is in fc" in lines[-1]
    assert "(fc.weight[0]: a dimension of the model's output)" in lines[-1]
    assert not command.files()


def test_protected_layers_are_named_where_they_block(command: Command) -> None:
    ended = command(*PAIR, "--macs", "0.1", "--protect", "2 features")
    assert ended.code == Exit.TARGET
    assert "the lowest is 0.135" in ended.error
    assert "2 29% (2 features: protected)" in ended.error


def test_a_model_in_which_nothing_can_be_cut(command: Command) -> None:
    Path("flat.py").write_text("import torch\nflat = lambda: (torch.nn.Linear(4, 2), torch.ones(1, 4))\n")
    ended = command("prune", "flat.py:flat", "--ratio", "0.5")
    assert ended.code == Exit.TARGET
    assert "nothing in flat can be cut: " in ended.error
    assert "a dimension of the model's output" in ended.error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "how small? Give one of --macs, --params, --bytes, --latency, --ratio"),
        (["--macs", "2"], "--macs: Macs takes a fraction above 0, at most 1, or a number, as in Macs(0.5) or"),
        (["--ratio", "1"], "--ratio: Ratio: ratio is a fraction from 0 up to, not including, 1"),
        (["--macs", "half"], "--macs: Macs takes a fraction above 0, at most 1, or a number"),
        (["--macs", "0.5", "--ratio", "0.5"], "--ratio decides by itself; give it without --macs"),
        (["--marcs", "0.5"], "there is no option --marcs; did you mean --macs"),
        (["--macs", "0.5", "extra"], "extra is one argument too many"),
        (["--macs", "0.5", "--importance", "magnitud"], "did you mean magnitude?"),
        (["--macs", "0.5", "--importance", "taylor"], "looks at data; give it with --data"),
        (["--macs", "0.5", "--importance", "taylor", "--data", "net.py:pairs"], "needs a loss; give it with --loss"),
        (["--macs", "0.5", "--importance", "wanda", "--data", "net.py:number"], "net.py:number is a int"),
        (["--macs", "0.5", "--compensate"], "--compensate looks at data; give it with --data"),
        (["--macs", "0.5", "--weights", "nowhere.safetensors"], "there is no such file"),
        (["--macs", "0.5", "--example", "one"], "give a shape such as"),
        (["--macs", "0.5", "--example", "1x5"], "--example 1x5: Sequential could not be run on the example"),
        (["--macs", "0.5", "--protect", "nothing*"], "protect: no tensor and no axis matches 'nothing*'"),
        (["--macs", "0.5", "--round-to", "0"], "--round-to 0: give a whole number from 1 on"),
        (["--macs", "0.5", "--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--macs", "0.5", "--device", "meta"], "--device meta cannot be used here"),
        (["--macs", "0.5", "--dtype", "bfloat"], "--dtype bfloat: it is one of float32, float64, float16, bfloat16"),
        (["--macs", "8ms"], "--macs: Macs takes a fraction above 0, at most 1, or a number"),
        (["--latency", "8M"], "--latency: Latency takes a fraction above 0, at most 1, or seconds"),
    ],
    ids=range(22),
)
def test_a_wrong_command_line(command: Command, words: list[str], message: str) -> None:
    ended = command(*PAIR, *words)
    assert ended.code == Exit.USAGE
    assert message in ended.error
    assert not command.files()


def test_what_is_loadable_opens_again(command: Command, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    arguments = ["--params", "0.8", "--loadable", "--out", str(tmp_path / "out"), "--json"]
    done = command("prune", f"transformers:{tmp_path}/model", *arguments)
    assert done.code == 0, done.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert model.config.intermediate_size == plan["fields"]["intermediate_size"] < 64
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
