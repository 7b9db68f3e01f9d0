"""Files that say how a model is built, made to have something else imported, called, fetched or filled."""

import functools
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm  # noqa: F401
import torch
from crafted import Parts
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.io import load, save
from secateur.tracing.constructor import Maker
from secateur.tracing.shell import shell

WORDS = {"input_ids": torch.arange(5)[None]}


@functools.cache
def genuine() -> Parts:
    """The file of a cut Llama, which loads without a model."""
    sizes: Any = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).eval()
    sec.apply(model, sec.plan(sec.trace(model, WORDS, variants=False), sec.Ratio(0.5)), verify=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        save(model, path)
        assert isinstance(load(path), LlamaForCausalLM)
        return Parts.of(path)


def refuses(path: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    with pytest.raises(sec.FileError, match=words) as caught:
        load(genuine().changed(lambda said: change(said["origin"])).to(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def origin(library: str, name: str, /, **arguments: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: said.update(library=library, name=name, arguments=json.dumps(arguments))


def config(**entries: Any) -> Callable[[dict[str, Any]], Any]:
    def change(said: dict[str, Any]) -> None:
        said["arguments"] = json.dumps({**json.loads(said["arguments"]), **entries})

    return change


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("os", "system"),
        ("builtins", "exec"),
        ("subprocess", "Popen"),
        ("", "Linear"),
        ("", "os.system"),
        ("torch", "load"),
        ("transformers.models", "LlamaForCausalLM"),
        ("secateur", "load"),
        ("antigravity", "fly"),
        ("../evil", "run"),
    ],
)
def test_any_other_library(tmp_path: Path, library: str, name: str) -> None:
    refuses(tmp_path / "file", origin(library, name, command="true"), "no model of transformers, diffusers, timm")


@pytest.mark.parametrize(
    "name",
    [
        "pipeline",
        "AutoModel",
        "Trainer",
        "LlamaConfig",
        "PreTrainedTokenizerFast",
        "os",
        "utils.hub.cached_file",
        "__class__",
        "models.llama.modeling_llama.os.system",
        "",
        "Llama\0ForCausalLM",
    ],
)
def test_what_a_library_offers_beside_models(tmp_path: Path, name: str) -> None:
    refuses(tmp_path / "file", origin("transformers", name, command="true"), "transformers has no model|could not be")


def test_functions_of_timm_and_torchvision(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for name in ("create_model", "hf-hub:evil/model", "local-dir:/tmp", "../resnet18", "load_checkpoint"):
        refuses(path, origin("timm", name), "timm has no model")
    for key in ("checkpoint_path", "pretrained", "pretrained_cfg", "cache_dir", "pretrained_cfg_overlay"):
        refuses(path, origin("timm", "resnet18", **{key: "/etc/passwd"}), f"it sets '{key}'")
    for name in ("get_model", "list_models", "os", "_api", "ResNet50_Weights"):
        refuses(path, origin("torchvision", name, name="resnet18"), "torchvision has no model")


def test_a_genuine_model_of_another_kind(tmp_path: Path) -> None:
    """A known class, which builds, but is not that of the tensors."""
    refuses(tmp_path / "file", origin("transformers", "GPT2Model", n_embd=8, n_layer=1, n_head=2), "it holds a")
    refuses(tmp_path / "file", origin("timm", "resnet18"), "it holds a 'LlamaForCausalLM', the model is a ResNet")


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "evil/kernel"},
        {"attn_implementation": "paged|evil/kernel"},
        {"_attn_implementation": "evil/kernel"},
        {"experts_implementation": "evil/kernel"},
        {"auto_map": {"AutoModel": "evil/repo--code.Evil"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"fusion_config": {"patch_embeddings": True}},
        {"trust_remote_code": True},
        {"sub": [{"text_config": {"attn_implementation": "evil/kernel"}}]},
    ],
)
def test_a_configuration_that_asks_for_code(tmp_path: Path, entries: dict[str, Any]) -> None:
    refuses(tmp_path / "file", config(**entries), "which is more than a description")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "entries",
    [
        {"hidden_size": 2**40, "head_dim": 2**39},
        {"vocab_size": 2**50},
        {"num_hidden_layers": 10**9},
        {"intermediate_size": -5},
        {"hidden_size": "large"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"head_dim": 2**33},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": "x"}},
    ],
)
def test_sizes_that_no_machine_has(tmp_path: Path, entries: dict[str, Any]) -> None:
    refuses(tmp_path / "file", config(**entries), ".")


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"a": NaN', "[" * 100_000, "null"])
def test_arguments_that_are_none(tmp_path: Path, text: str) -> None:
    refuses(tmp_path / "file", lambda said: said.update(arguments=text), "no JSON object|could not be built")


def test_entries_of_another_type(tmp_path: Path) -> None:
    for entry in (3, "transformers", [], {"library": "transformers"}, {"library": 1, "name": 2, "arguments": "{}"}):
        with pytest.raises(sec.FileError):
            load(genuine().changed(lambda said, entry=entry: said.update(origin=entry)).to(tmp_path / "file"))
    wrong = (("tables", [3]), ("tables", "x"), ("training", 1), ("unbuilt", 5), ("tables", ["nothing"]))
    wrong += (("frozen", 3), ("frozen", [3]), ("frozen", ["nothing"]), ("generation", ["x"]))
    for key, entry in wrong:
        with pytest.raises(sec.FileError):
            load(genuine().changed(lambda said, k=key, e=entry: said.update({k: e})).to(tmp_path / "file"))


def test_a_constructor_that_connects_or_reads() -> None:
    """Building what a file names reaches no network and no files, whatever the arguments ask for."""

    class Fetching(nn.Module):
        def __init__(self, port: int = 0, path: str = "") -> None:
            super().__init__()
            if port:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
            if path:
                Path(path).read_text()
            self.layer = nn.Linear(2, 2)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(sec.SecateurError, match="connects to another machine"):
            shell(Maker(Fetching, {"port": port}), 2)
        shell(Maker(Fetching, {"port": port}), 2, closed=False)
    with pytest.raises(sec.SecateurError, match="opens '/etc/passwd'"):
        shell(Maker(Fetching, {"path": "/etc/passwd"}), 2)
    Fetching(path="/etc/passwd")


def test_a_configuration_that_reads_files(tmp_path: Path) -> None:
    """timm's models in Transformers may be named by a folder."""
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    change = origin("transformers", "TimmWrapperModel", architecture=f"local-dir:{tmp_path}", model_type="timm_wrapper")
    refuses(tmp_path / "file", change, "opens '.*config.json'|could not be built")


def test_nothing_is_imported_or_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("import os; os.environ['EVIL'] = 'yes'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for library, name in (("evil", "Net"), ("", "evil.Net"), ("transformers", "evil"), ("timm", "evil")):
        refuses(tmp_path / "file", origin(library, name), ".")
    assert "EVIL" not in os.environ


def test_folders(tmp_path: Path) -> None:
    """A folder's plan and config are as little trusted."""
    model = load(genuine().to(tmp_path / "file"))
    folder = tmp_path / "folder"
    model.save_pretrained(folder)  # type: ignore[operator]
    plan = json.loads((folder / "secateur.json").read_text())

    def says(words: str, **origin: Any) -> None:
        (folder / "secateur.json").write_text(json.dumps({**plan, "origin": {**plan["origin"], **origin}}))
        with pytest.raises(sec.FileError, match=words):
            load(folder)

    says("no model of transformers", library="os", name="system")
    says("no JSON object", arguments="[]")
    says("should be str", name=3)
    (folder / "secateur.json").write_text("{")
    with pytest.raises(sec.FileError, match="not a plan"):
        load(folder)
    (folder / "secateur.json").unlink()
    with pytest.raises(sec.FileError, match="holds no cut model"):
        load(folder)
    with pytest.raises(sec.FileError, match="holds no cut model"):
        load(tmp_path)
