"""A language model is pruned with a text: its own tokenizer, windows, and perplexity on what was not fitted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from command_line import Command

from secateur.cli.exits import Exit

WORDS = [f"w{n}" for n in range(40)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that has learnt that each word follows another, with its tokenizer."""
    tmp_path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=41, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    steps = torch.arange(32)
    for _ in range(60):
        batch = (torch.randint(0, 40, (16, 1)) + steps) % 40
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "tiny")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({**{w: n for n, w in enumerate(WORDS)}, "?": 40}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


def corpus(words: int) -> Path:
    path = Path("corpus.txt")
    path.write_text(" ".join(WORDS[n % 40] for n in range(words)))
    return path


def test_a_text_ranks_refits_and_judges(command: Command, folder: Path) -> None:
    more = ("--importance", "reconstruction", "--compensate", "--data", str(corpus(32 * 24)))
    ended = command("prune", f"transformers:{folder}", "--params", "0.5", "--out", "out", *more)
    assert ended.code == Exit.DONE, ended.err
    before, after = map(float, re.search(r"perplexity on text.*: ([\d.]+) → ([\d.]+)", ended.err).groups())
    assert 1 <= before < 3  # it had learnt to count
    assert before <= after < 20  # far below the 40 of a guess
    assert Path("out/model.safetensors").exists()


def test_a_text_alone_ranks_and_refits_as_well(command: Command, folder: Path) -> None:
    data, found = ("--data", str(corpus(32 * 24))), {}
    asked = {"text alone": (), "both": ("--importance", "reconstruction", "--compensate"), "one": ("--compensate",)}
    for out, more in asked.items():
        ended = command("prune", f"transformers:{folder}", "--params", "0.5", "--out", out, *data, *more)
        assert ended.code == Exit.DONE, ended.err
        found[out] = Path(out, "model.safetensors").read_bytes()
    assert found["text alone"] == found["both"] != found["one"]


def test_a_text_makes_zeros_and_judges(command: Command, folder: Path) -> None:
    data = str(corpus(32 * 24))
    ended = command("sparsify", f"transformers:{folder}", "--nm", "2:4", "--out", "out", "--data", data)
    assert ended.code == Exit.DONE, ended.err
    before, after = map(float, re.search(r"perplexity on text.*: ([\d.]+) → ([\d.]+)", ended.err).groups())
    assert 1 <= before < 3
    assert before <= after < 20
    assert "the same largest output in" in ended.out


def test_texts_that_cannot_be_used(command: Command, folder: Path) -> None:
    def said(model: str, data: str) -> tuple[int, str]:
        ended = command("prune", model, "--ratio", "0.5", "--compensate", "--data", data)
        assert not Path("tiny-pruned").exists()
        return ended.code, ended.error

    model = f"transformers:{folder}"
    code, error = said(model, str(corpus(100)))
    assert (code, "100 tokens" in error, "it takes 256" in error) == (Exit.INPUT, True, True)
    assert said("timm:resnet18", "corpus.txt")[0] == Exit.USAGE
    assert said(model, "nowhere.txt")[0] == Exit.INPUT
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in said(model, "binary.txt")[1]
    for file in folder.glob("token*"):
        file.unlink()
    code, error = said(model, str(corpus(32 * 9 + 1)))
    assert code == Exit.INPUT
    assert "no tokenizer" in error


def test_what_is_too_large_for_memory_stays_in_its_files(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--params", "0.5", "--loadable", "--compensate", "--data", str(corpus(32 * 16)))
    model = f"transformers:{folder}"
    ended = command("prune", model, "--out", "one", *more)
    assert ended.code == Exit.DONE, ended.err
    monkeypatch.setattr("secateur.cli.models.free_memory", lambda: 0)
    large = command("prune", model, "--out", "two", *more)
    assert large.code == Exit.DONE, large.err
    assert "too large for memory: its weights stay in their files" in large.err
    assert re.search(r"perplexity.*", large.err)[0] == re.search(r"perplexity.*", ended.err)[0]
    assert Path("two/plan.json").read_text() == Path("one/plan.json").read_text()
    assert Path("two/tokenizer.json").exists()
    one, two = (transformers.LlamaForCausalLM.from_pretrained(out) for out in ("one", "two"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    for words, said in (
        (("--onnx",), "too large for memory; export what comes out"),
        (("--dtype", "float64"), "leave out --weights, --device and --dtype"),
        (("--out", "two", "--force"), "has files already"),
    ):
        ended = command("prune", model, "--out", "three", "--ratio", "0.5", *words)
        assert ended.code != Exit.DONE
        assert said in ended.err
        assert not Path("three").exists()
