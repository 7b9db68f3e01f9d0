"""MODEL in all its forms, and what is said where it is none of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from command_line import Command

from secateur.cli import models
from secateur.cli.exits import Exit


def classes(command: Command, *argv: object) -> tuple[str, int]:
    ended = command("inspect", *argv, "--json")
    assert ended.code == Exit.DONE, ended.err
    found = json.loads(ended.out)
    return found["class"], len(found["axes"])


def test_timm(command: Command) -> None:
    assert classes(command, "timm:test_vit") == ("VisionTransformer", 19)


def test_torchvision(command: Command) -> None:
    assert classes(command, "torchvision:squeezenet1_1") == (
        "SqueezeNet",
        25,
    )  # the first layer, and three in each of eight modules


@pytest.mark.parametrize("name", ["pair", "build", "Net", "made"])
def test_a_users_file(command: Command, name: str) -> None:
    example = [] if name == "pair" else ["--example", "1x4"]
    assert classes(command, f"net.py:{name}", *example)[1] == 2


def test_a_file_that_imports_its_neighbour(command: Command) -> None:
    folder = command.folder / "nets"
    folder.mkdir()
    (folder / "sizes_beside.py").write_text("WIDTH = 6\n")
    (folder / "mine.py").write_text(
        "import torch\nfrom sizes_beside import WIDTH\n"
        "build = lambda: torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 2))\n"
    )
    try:
        assert classes(command, "nets/mine.py:build", "--example", "1x4")[1] == 1
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_transformers_configuration(command: Command, tiny: Path) -> None:
    assert classes(command, f"transformers:{tiny}") == classes(command, f"transformers:{tiny / 'config.json'}")
    assert classes(command, f"transformers:{tiny}")[0] == "LlamaForCausalLM"


def test_a_transformers_folder_with_weights(command: Command, tiny: Path) -> None:
    """Its weights are those that are cut and saved, and nobody is told that they are random."""
    config = transformers.AutoConfig.from_pretrained(tiny)
    model = transformers.LlamaForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, 7.0)
    model.save_pretrained(tiny)
    ended = command("prune", f"transformers:{tiny}", "--ratio", "0.5", "--out", "out")
    assert ended.code == Exit.DONE, ended.err
    assert "random weights" not in ended.err
    from safetensors.torch import load_file

    norm = load_file("out/model.safetensors")["model.norm.weight"]
    assert norm.eq(7.0).all()
    assert norm.numel() == 16


def test_a_transformers_folder_with_a_pickle(command: Command, tiny: Path) -> None:
    (tiny / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    ended = command("inspect", f"transformers:{tiny}")
    assert ended.code == Exit.INPUT
    assert "pytorch_model.bin is a pickle" in ended.error


def test_a_large_type_is_inspected_without_its_weights(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_memory", lambda: 1_000_000)
    Path("large.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    found = json.loads(command("inspect", "transformers:large.json", "--json").out)
    assert found["params"] == 666_914_816


def test_a_type_that_does_not_fit_into_memory(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_memory", lambda: 1_000_000)
    ended = command("prune", "transformers:llama", "--macs", "0.5")
    assert ended.code == Exit.INPUT
    assert "27.0 GB of weights, and 1.0 MB of memory are free" in ended.error


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("vit", {"pixel_values": (1, 3, 224, 224)}),
        ("bert", {"input_ids": (1, 16)}),
        ("t5", {"input_ids": (1, 16), "decoder_input_ids": (1, 16)}),
        ("wav2vec2", {"input_values": (1, 16000)}),
        ("clip", {"input_ids": (1, 16), "pixel_values": (1, 3, 224, 224)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_examples_for_transformers(kind: str, inputs: dict[str, tuple[int, ...]]) -> None:
    from secateur.cli.models import Wanted

    example = models._transformers(kind, Wanted(weights=False)).example
    assert {name: tuple(tensor.shape) for name, tensor in example.items()} == inputs


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("timm:resnet81", Exit.USAGE, "timm has no model 'resnet81'; did you mean resnet18"),
        ("torchvision:resnet5", Exit.USAGE, "torchvision has no model 'resnet5'; did you mean resnet50"),
        ("transformers:lama", Exit.USAGE, "no model type 'lama'; did you mean llama"),
        ("transformers:nowhere/config.json", Exit.USAGE, "there is no nowhere/config.json"),
        ("tim:resnet18", Exit.USAGE, "there is no source 'tim'; did you mean timm?"),
        ("timm:", Exit.USAGE, "MODEL is timm:NAME"),
        ("resnet18", Exit.USAGE, "MODEL is timm:NAME"),
        ("net.py", Exit.USAGE, "which callable in it builds the model? Say net.py:NAME"),
        ("nowhere.py:build", Exit.USAGE, "nowhere.py: there is no such file"),
        ("net.py:biuld", Exit.USAGE, "net.py defines no 'biuld'; did you mean build?"),
        ("net.py:build", Exit.USAGE, "what is its input? Give its shape, as in --example"),
        ("net.py:number", Exit.INPUT, "neither a model nor a callable that returns one; its type is int"),
        ("net.py:nothing", Exit.INPUT, "returned something of type NoneType; return an nn.Module"),
        ("net.py:fails", Exit.INPUT, "net.py:fails raised ValueError at net.py:35: first line second line"),
        ("net.py:imports", Exit.USAGE, "needs no_such_package, which is not installed: pip install no_such_package"),
        ("wrong.py:build", Exit.INPUT, "wrong.py:1: invalid syntax"),
        ("small.safetensors", Exit.USAGE, "holds weights and no code; name the model, and pass it as --weights"),
        (".", Exit.USAGE, "this is a folder, not a model"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_no_model(command: Command, model: str, code: Exit, words: str) -> None:
    (command.folder / "wrong.py").write_text("def (:\n")
    ended = command("inspect", model)
    assert ended.code == code
    assert words in ended.error


def test_what_no_run_showed_is_said(command: Command) -> None:
    (command.folder / "idle.py").write_text(
        "import torch\n\n\nclass Idle(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.other = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)\n"
        "        self.b = torch.nn.Linear(8, 2)\n\n    def forward(self, x, other=None):\n"
        "        return self.other(self.a(x)) if other else self.b(self.a(x))\n"
    )
    asked = ("inspect", "idle.py:Idle", "--example", "1x4")
    ended = command(*asked)
    assert "no run showed" in ended.out
    assert "other: no run reached it" in ended.out
    assert "idle.py:10" in ended.out
    assert {"what": "other: no run reached it", "where": "idle.py:10"} in json.loads(command(*asked, "--json").out)[
        "unseen"
    ]


def test_an_example_that_does_not_fit(command: Command) -> None:
    ended = command("inspect", "net.py:pair", "--example", "1x5")
    assert ended.code == Exit.USAGE
    assert "could not be run on the example" in ended.error
    ended = command("inspect", "timm:test_vit", "--example", "1x3x100x100")
    assert "could not be run on the example" in ended.error
    assert "guessed" not in ended.error


def test_pretrained_weights_are_asked_for(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no network here: what counts is that the package is asked for its weights."""
    import timm
    import torchvision

    asked = []
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: asked.append(pretrained) or create(name))
    get = torchvision.models.get_model
    monkeypatch.setattr(torchvision.models, "get_model", lambda name, weights: asked.append(weights) or get(name))
    for flags in ([], ["--pretrained"]):
        for model in ("timm:test_vit", "torchvision:squeezenet1_1"):
            assert command("inspect", model, *flags, "-q").code == Exit.DONE
    assert asked == [False, None, True, "DEFAULT"]


@pytest.mark.parametrize("package", ["timm", "torchvision", "transformers"])
def test_a_missing_package_gets_the_line_that_installs_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as good as not installed
    ended = command("inspect", f"{package}:some")
    assert ended.code == Exit.USAGE
    assert ended.error == f"{package}:some needs {package}, which is not installed: pip install {package}"


@pytest.mark.parametrize(
    ("words", "package", "install"),
    [
        (("prune", "net.py:pair", "--ratio", "0.5", "--onnx"), "onnxruntime", "onnxruntime"),
        (("prune", "net.py:pair", "--ratio", "0.5", "--report"), "plotly", "plotly"),
        (("demo",), "sklearn", "scikit-learn"),
    ],
    ids=["onnx", "report", "demo"],
)
def test_packages_that_options_need(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], package: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    ended = command(*words)
    assert ended.code == Exit.USAGE
    assert f"which is not installed: pip install {install}" in ended.error
    assert not command.files()
