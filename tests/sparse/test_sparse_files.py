"""A checkpoint that gets zeros from files to files is what `sparsify` makes in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.sparse import files as in_files


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def mapped(model: nn.Module, under: str) -> bool:
    """Whether all parameters are memory that is mapped from files."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(end, 16) for end in words[0].split("-")] for words in lines if words[-1].startswith(under)]
    return all(any(a <= p.data_ptr() < b for a, b in spans) for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_sparsify_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    whole, out = tmp_path / "whole", tmp_path / "sparse"
    made = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=48, intermediate_size=64)).to(dtype)
    made.save_pretrained(whole, max_shard_size="20kB")
    (whole / "tokenizer.json").write_text("{}")
    batches = [{"input_ids": torch.randint(48, (2, 24))} for _ in range(3)]
    before, where = contents(whole), []

    solve = in_files.OneShot.solved

    def solved(self: Any, dense: nn.Module, sparse: nn.Module, *more: Any) -> Any:
        where.append((mapped(dense, str(whole)), mapped(sparse, str(tmp_path / ".secateur-"))))
        return solve(self, dense, sparse, *more)

    monkeypatch.setattr(in_files.OneShot, "solved", solved)
    report = sec.sparsify_checkpoint(whole, sec.NM(2, 4), batches, out, held_back=batches[:1])
    assert where == [(True, True)]
    assert contents(whole) == before

    model = LlamaForCausalLM.from_pretrained(whole, dtype="auto")
    again = sec.sparsify(model, batches, sec.NM(2, 4), held_back=batches[:1])
    assert (report.layers, report.left_alone, report.held_back) == (again.layers, again.left_alone, again.held_back)
    found = stored(out)
    assert {name: tuple(t.shape) for name, t in found.items()} == {n: tuple(t.shape) for n, t in stored(whole).items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.get(name, found["model.embed_tokens.weight"]), tensor), name
    assert {name for name in before if not name.endswith(".safetensors")} <= contents(out).keys()
    assert (out / "config.json").read_bytes() == before["config.json"]  # an ordinary checkpoint
    fresh = LlamaForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.equal(fresh(**batches[0]).logits, model(**batches[0]).logits)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    return nn.Sequential(made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def written(folder: Path) -> tuple[nn.Module, Sequence[Tensor]]:
    model = net()
    folder.mkdir()
    save_file(model.state_dict(), folder / "net.safetensors")
    return model, [torch.randn(16, 3, 8, 8) for _ in range(3)]


def test_batch_norms_take_their_statistics_anew(tmp_path: Path) -> None:
    model, batches = written(tmp_path / "whole")
    options: dict[str, Any] = {"method": sec.SparseGPT(), "spread": sec.ERK()}
    sec.sparsify_checkpoint(
        tmp_path / "whole", sec.Unstructured(0.5), batches, tmp_path / "out", model=model, **options
    )
    sec.sparsify(model, batches, sec.Unstructured(0.5), **options)
    found = stored(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert not torch.equal(found["0.1.running_mean"], stored(tmp_path / "whole")["0.1.running_mean"])


class Impatient:
    """A method that is interrupted at its second layer, when the first is written."""

    layers = 0

    def __call__(self, problem: sec.sparse.Problem, pattern: sec.sparse.Pattern) -> Tensor:
        self.layers += 1
        if self.layers == 2:
            raise KeyboardInterrupt
        return problem.weight * 0


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"out": "whole"}, sec.FileError, "checkpoint itself|something already"),
        ({"batches": [torch.zeros(2, 5, 8, 8)]}, sec.CalibrationError, "failed on batch 1"),
        ({"batches": [torch.full((4, 3, 8, 8), float("nan"))]}, sec.CalibrationError, "not finite"),
        ({"pattern": sec.NM(2, 7)}, sec.PlanError, "no multiple of 7"),
        ({"pattern": 0.5}, sec.PlanError, "pattern is a pattern"),
        ({"model": None}, sec.FileError, "pass the model"),
        ({"protect": ("nothing*",)}, sec.PlanError, "names no weight"),
        ({"method": Impatient()}, KeyboardInterrupt, None),
    ],
)
def test_whatever_fails_leaves_nothing(
    tmp_path: Path, change: dict[str, Any], error: type[BaseException], says: str | None
) -> None:
    model, batches = written(tmp_path / "whole")
    before = contents(tmp_path / "whole")
    given = {"pattern": sec.Unstructured(0.5), "batches": batches, "out": "sparse", "model": model, **change}
    pattern, data, out = given.pop("pattern"), given.pop("batches"), tmp_path / given.pop("out")
    with pytest.raises(error, match=says):
        sec.sparsify_checkpoint(tmp_path / "whole", pattern, data, out, **given)
    assert contents(tmp_path / "whole") == before
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_it_is_for_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = written(tmp_path / "whole")
    monkeypatch.setattr("secateur.io.compressing.ranks", lambda: 2)
    with pytest.raises(sec.FileError, match="sparsify_checkpoint is for one process"):
        sec.sparsify_checkpoint(tmp_path / "whole", sec.NM(2, 4), batches, tmp_path / "out", model=model)
