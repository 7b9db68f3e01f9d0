"""`secateur sparsify`: what it writes is opened by what opened the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Command
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.cli.exits import Exit

DATA = """
import torch

def tokens():
    chance = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(50, (2, 12), generator=chance)} for _ in range(9)]
"""


def test_a_folder_of_transformers_opens_again(command: Command, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "data.py").write_text(DATA)
    arguments = ["--nm", "2:4", "--data", f"{tmp_path}/data.py:tokens", "--out", str(tmp_path / "out"), "--json"]
    done = command("sparsify", f"transformers:{tmp_path}/model", *arguments, "--picture")
    assert done.code == Exit.DONE, done.err
    told = json.loads(done.out)
    assert told["sparsity"] == 0.5
    assert {"model.safetensors", "config.json", "tokenizer.json", "sparsity.json", "zeros.png"} <= set(told["files"])
    assert told["held_back"]["batches"] == 1
    assert (tmp_path / "out" / "zeros.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert ((weight.view(-1, 4) != 0).sum(1) <= 2).all()
    assert model.lm_head.weight.all()


def test_what_is_too_large_for_memory_stays_in_its_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "model")
    (tmp_path / "data.py").write_text(DATA)
    model = f"transformers:{tmp_path}/model"
    arguments = ["--sparsity", "0.5", "--data", f"{tmp_path}/data.py:tokens", "--json"]
    done = command("sparsify", model, *arguments, "--out", str(tmp_path / "one"))
    monkeypatch.setattr("secateur.cli.models.free_memory", lambda: 0)
    large = command("sparsify", model, *arguments, "--out", str(tmp_path / "two"))
    assert large.code == Exit.DONE, large.err
    assert "too large for memory: its weights stay in their files" in large.err
    told = [json.loads(ended.out) for ended in (done, large)]
    assert told[0]["layers"] == told[1]["layers"]
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / out) for out in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    again = command("sparsify", model, *arguments, "--out", str(tmp_path / "two"), "--force")
    assert again.code != Exit.DONE
    assert "has files already" in again.err


def test_another_model_becomes_a_file_for_load(command: Command, tmp_path: Path) -> None:
    arguments = [
        "--sparsity",
        "0.5",
        "--method",
        "sparsegpt",
        "--data",
        "net.py:examples",
        "--out",
        str(tmp_path / "out"),
    ]
    done = command("sparsify", "net.py:build", *arguments)
    assert done.code == Exit.DONE, done.err
    assert "2.weight" in done.out
    fresh = torch.nn.Sequential(
        *(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    )
    sec.load(tmp_path / "out" / "model.safetensors", fresh)
    assert int((fresh[2].weight == 0).sum()) == 64


def test_blocks_in_what_is_named(command: Command, tmp_path: Path) -> None:
    which = ["--block", "2x1:0.5", "--protect", "0", "--include", "4.weight", "--method", "magnitude"]
    done = command(
        "sparsify", "net.py:build", *which, "--data", "net.py:examples", "--out", str(tmp_path / "out"), "--json"
    )
    assert done.code == Exit.DONE, done.err
    told = json.loads(done.out)
    assert [layer["name"] for layer in told["layers"]] == ["2.weight", "4.weight"]
    assert told["left_alone"] == {"0.weight": "protected"}
    assert told["sparsity"] == 0.5


@pytest.mark.parametrize(
    ("options", "exit_", "says"),
    [
        (["--nm", "2-4"], Exit.USAGE, "say N:M"),
        (["--nm", "5:4"], Exit.USAGE, "n is at most m"),
        (["--block", "4"], Exit.USAGE, "say HxW"),
        (["--sparsity", "1.5"], Exit.USAGE, "fraction of zeros"),
        (["--sparsity", "0.5", "--nm", "2:4"], Exit.USAGE, "not allowed with"),
        ([], Exit.USAGE, "required"),
        (["--nm", "3:7"], Exit.TARGET, "no multiple of 7"),
    ],
)
def test_bad_arguments(command: Command, tmp_path: Path, options: list[str], exit_: Exit, says: str) -> None:
    done = command("sparsify", "net.py:build", *options, "--data", "net.py:examples", "--out", str(tmp_path / "out"))
    assert done.code == exit_, done.err
    assert says in done.err
    assert not (tmp_path / "out").exists()
