"""Saved and loaded, a cut model computes what it did, to the last bit."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from io_models import MODELS, cut, facts, perceptron, run
from safetensors import safe_open
from second_process import child
from torch import nn

import secateur as sec
from represented import represented
from secateur.io import load, save
from secateur.pipeline.apply import plan_of


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("name", represented(MODELS, by=("encoder", "llama", "lstm", "perceptron", "resnet18", "tied")))
def test_cut_saved_and_loaded_computes_the_same(name, tmp_path):
    build, example = MODELS[name]
    full = build()
    small = cut(build(), example)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in full.parameters())
    save(small, tmp_path / "small.safetensors")
    assert load(tmp_path / "small.safetensors", full) is full
    assert equal(run(full, example), run(small, example))
    assert facts(full) == facts(small)
    assert plan_of(full) == plan_of(small)


@pytest.mark.parametrize("name", represented(MODELS, by=("encoder", "llama", "lstm", "tied")))
def test_cut_twice_then_saved(name, tmp_path):
    build, example = MODELS[name]
    small = cut(cut(build(), example, 0.25), example, 0.5)
    save(small, tmp_path / "small.safetensors")
    fresh = load(tmp_path / "small.safetensors", build())
    assert equal(run(fresh, example), run(small, example))
    assert facts(fresh.eval()) == facts(small)


def test_cut_loaded_cut_again_and_saved(tmp_path):
    build, example = MODELS["encoder"]
    save(cut(build(), example, 0.25), tmp_path / "a")
    again = cut(load(tmp_path / "a", build()), example, 0.5)
    save(again, tmp_path / "b")
    assert equal(run(load(tmp_path / "b", build()), example), run(again, example))


def test_a_model_that_was_never_cut(tmp_path):
    net, example = perceptron(), torch.ones(2, 4)
    save(net, tmp_path / "net")
    fresh = load(tmp_path / "net", perceptron())
    assert equal(run(fresh, example), run(net, example))
    assert plan_of(fresh) is None
    cut(fresh, example)


def test_trained_after_the_cut(tmp_path):
    build, example = MODELS["lstm"]
    small = cut(build(), example).train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.5)
    before = run(small, example)
    for _ in range(2):
        nn.functional.cross_entropy(small(example), torch.tensor([0, 1])).backward()
        optimizer.step()
    save(small, tmp_path / "small")
    assert not equal(run(small, example), before)
    assert equal(run(load(tmp_path / "small", build()), example), run(small, example))


def test_the_loaded_model_trains(tmp_path):
    build, example = MODELS["tied"]
    save(cut(build(), example), tmp_path / "small")
    fresh = load(tmp_path / "small", build())
    assert fresh.out.weight is fresh.embed.weight
    fresh(example).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in fresh.parameters())


def test_in_another_process(tmp_path):
    build, example = MODELS["encoder"]
    small = cut(build(), example)
    save(small, tmp_path / "small")
    torch.save(run(small, example), tmp_path / "wanted")
    child(
        """
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            out = load("small", net).eval()(x)
        assert torch.equal(out, torch.load("wanted", weights_only=True))
        save(net.train(), "again")
        """,
        tmp_path,
    )
    assert (tmp_path / "again").read_bytes() == (tmp_path / "small").read_bytes()


def test_through_torch_compile(tmp_path):
    build, example = MODELS["perceptron"]
    compiled = torch.compile(build().eval(), backend="eager")
    cut(compiled, example)
    save(compiled, tmp_path / "small")
    fresh = torch.compile(build().eval(), backend="eager")
    assert load(tmp_path / "small", fresh) is fresh
    assert equal(run(fresh, example), run(compiled, example))


def test_through_data_parallel_and_distributed_data_parallel(tmp_path):
    build, example = MODELS["perceptron"]
    save(cut(nn.DataParallel(build()), example), tmp_path / "parallel")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(build())
        cut(wrapped, example)
        save(wrapped, tmp_path / "distributed")
        load(tmp_path / "parallel", nn.parallel.DistributedDataParallel(build()))
    finally:
        dist.destroy_process_group()
    assert equal(run(load(tmp_path / "distributed", build()), example), run(wrapped.module, example))


def test_modes_flags_and_identities_of_the_model_stay(tmp_path):
    build, example = MODELS["perceptron"]
    save(cut(build(), example), tmp_path / "small")
    fresh = build().train()
    fresh[3].bias.requires_grad_(False)
    uncut, running = fresh[3].bias, fresh[1].num_batches_tracked
    hidden = fresh[0].weight
    load(tmp_path / "small", fresh)
    assert fresh.training
    assert not fresh[3].bias.requires_grad
    assert fresh[0].weight.requires_grad
    assert fresh[3].bias is uncut
    assert fresh[1].num_batches_tracked is running
    assert fresh[0].weight is hidden


def test_the_file_is_plain_safetensors_without_an_example(tmp_path):
    build, example = MODELS["tied"]
    small = cut(build(), example)
    save(small, tmp_path / "small")
    with safe_open(tmp_path / "small", framework="pt") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert names == set(small.state_dict()) - {"out.weight"}
    (entry,) = metadata.values()
    said = json.loads(entry)
    assert said["tied"] == {"embed.weight": ["out.weight"]}
    assert said["class"] == "TiedEmbedding"
    assert said["version"] == 1
    assert said["library"]
    kept = sec.Plan.from_json(json.dumps(said["plan"]))
    assert kept == plan_of(small)
    assert kept.example is None


@pytest.mark.parametrize("name", ["umlaut-ä.st", "with space", "x" * 255])
def test_any_file_name(tmp_path, name):
    net = perceptron()
    save(net, tmp_path / name)
    save(net, str(tmp_path / name))
    assert torch.equal(load(str(tmp_path / name), perceptron())[0].weight, net[0].weight)
    assert [p.name for p in Path(tmp_path).iterdir()] == [name]


def test_a_name_that_cannot_be_loaded_is_not_written(tmp_path):
    with pytest.raises(sec.FileError, match="not UTF-8"):
        save(perceptron(), tmp_path / "no\udcffutf8")
    assert list(tmp_path.iterdir()) == []
