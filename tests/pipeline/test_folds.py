"""Scales of single positions are folded into weights, so that axes with norms on them can be rotated."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.calibrate import call
from secateur.pipeline.bases import Bases


def shaken(model: nn.Module) -> nn.Module:
    """A model whose norms are not what they begin with."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer += torch.rand_like(buffer)
    return model.eval()


def mobilenet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return shaken(torchvision.models.mobilenet_v2(width_mult=0.25, num_classes=5)), torch.randn(2, 3, 64, 64)


def efficientnet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [MBConvConfig(1, 3, 1, 16, 8, 1, 1, 1), MBConvConfig(4, 3, 2, 8, 12, 2, 1, 1)]
    return shaken(EfficientNet(blocks, dropout=0.2, num_classes=5)), torch.randn(2, 3, 32, 32)


def llama(*, tied: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=61, num_hidden_layers=2, tie_word_embeddings=tied, **sizes)
    return shaken(LlamaForCausalLM(config)), {"input_ids": torch.randint(0, 61, (2, 7))}


def output(model, example) -> Tensor:
    with torch.no_grad():
        found = call(model, example)
    return getattr(found, "logits", found).double()


def off(model, before: Tensor, example) -> float:
    return float((output(model, example) - before).abs().max() / before.abs().max())


def turn(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0]


def by_tensor(model, example) -> dict[str, sec.Rotation]:
    """What is said of each axis, by every place that it has."""
    found = sec.rotations(sec.trace(model, example))
    return {str(site): rotation for rotation in found for site in rotation.axis.sites}


class Normed(nn.Module):
    """A stream that an RMSNorm reads, whose result goes on through something of one's own."""

    def __init__(self, between: nn.Module | None = None, beside=None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.out = nn.RMSNorm(8), nn.Linear(8, 3)
        self.between, self.beside = between or nn.Identity(), beside

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = self.between(x + self.two(x))
        normed = self.norm(x)
        return self.out(normed) if self.beside is None else self.beside(self, x, normed)


def normed(**given) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return shaken(Normed(**given)), torch.randn(5, 6)


def test_bottlenecks_and_streams_of_a_mobilenet_are_free_and_nothing_else() -> None:
    model, x = mobilenet()
    found = by_tensor(model, x)
    streams = {f"features.{n}.conv.2.weight[0]" for n in range(2, 18)}
    wide = {f"features.{n}.conv.0.0.weight[0]" for n in range(2, 18)} | {
        "features.0.0.weight[0]",
        "features.18.0.weight[0]",
    }
    assert all(found[name].free for name in streams)
    assert all("not linear" in found[name].why for name in wide)
    assert "features.4.conv.3.running_var and 2 more" in str(found["features.4.conv.2.weight[0]"])


@pytest.mark.parametrize("make", [mobilenet, efficientnet, lambda: llama(tied=False), normed])
def test_every_axis_with_norms_rotates_and_the_output_stays(make) -> None:
    model, example = make()
    graph = sec.trace(model, example)
    folded = [rotation for rotation in sec.rotations(graph) if rotation.free and rotation.folded]
    assert folded
    parameters = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    for rotation in folded:
        before = output(model, example)
        sec.rotate(model, graph, rotation.axis, turn(rotation.axis.size))
        assert off(model, before, example) < 2e-5
        changed = [s.tensor for s in rotation.axis.sites if s.tensor in parameters]
        assert any(not torch.equal(parameters[name][0], parameters[name][1]) for name in changed)
    assert all(parameter is parameters[name][0] for name, parameter in model.named_parameters())


def test_the_channels_of_a_squeeze_that_weigh_others_are_not_free() -> None:
    model, x = efficientnet()
    found = by_tensor(model, x)
    assert found["features.2.0.block.3.0.weight[0]"].free  # the projection's
    assert not found["features.2.0.block.0.0.weight[0]"].free
    assert not found["features.2.0.block.2.fc1.weight[0]"].free


def test_a_tied_head_keeps_a_stream_from_being_rotated() -> None:
    model, example = llama(tied=True)
    why = by_tensor(model, example)["model.layers.0.mlp.down_proj.weight[0]"].why
    assert "model.norm.weight cannot be folded" in why
    assert "tied" in why


def test_a_mean_over_positions_keeps_a_stream_from_being_rotated() -> None:
    torch.manual_seed(0)
    model = shaken(
        GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0))
    )
    found = by_tensor(model, {"input_ids": torch.randint(0, 61, (2, 7))})
    assert "takes away the mean over positions" in found["transformer.h.0.mlp.c_proj.weight[1]"].why


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        (lambda m, x, n: m.out(n.relu()), "also goes into aten::relu"),
        (lambda m, x, n: m.out(n) + m.out(x), "reads other data as well"),
        (lambda m, x, n: m.out(n) + n.sum(-1, keepdim=True), "also goes into aten::sum"),
        (lambda m, x, n: m.out(m.two(n)), "reads other data as well"),
    ],
)
def test_what_else_reads_a_norm_keeps_its_stream_from_being_rotated(beside, why: str) -> None:
    found = by_tensor(*normed(beside=beside))["one.weight[0]"]
    assert not found.free
    assert why in found.why


def test_what_bends_far_from_the_example_is_found_behind_a_norm_too() -> None:
    assert by_tensor(*normed())["one.weight[0]"].free
    assert by_tensor(*normed(between=nn.RMSNorm(8, elementwise_affine=False)))["one.weight[0]"].free
    for between in (nn.Hardtanh(-1e2, 1e2), nn.Tanh(), nn.LayerNorm(8, elementwise_affine=False)):
        assert "looked at together" in by_tensor(*normed(between=between))["one.weight[0]"].why


class Twice(nn.Module):
    """Two products in front of one norm, or one product in front of two."""

    def __init__(self, *, products: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 6, 1)
        self.other = self.one if products == 1 else nn.Conv2d(3, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.beside = nn.BatchNorm2d(6) if products == 1 else self.norm
        self.read = nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.norm(self.one(x)) + self.beside(self.other(2 * x)))


@pytest.mark.parametrize("products", [1, 2])
def test_a_norm_with_several_products_and_a_product_with_several_norms_stay(products: int) -> None:
    torch.manual_seed(0)
    found = by_tensor(shaken(Twice(products=products)), torch.randn(2, 3, 8, 8))["one.weight[0]"]
    assert "cannot be folded" in found.why


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d, nn.ConvTranspose2d])
def test_products_of_each_kind_take_the_scale_of_the_norm_behind(kind) -> None:
    torch.manual_seed(0)
    taps, dims = (() if kind is nn.Linear else (1,)), {nn.Linear: 0, nn.Conv1d: 1, nn.ConvTranspose2d: 2}[kind]
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[dims](6)
    model, x = shaken(nn.Sequential(kind(4, 6, *taps), norm, kind(6, 3, *taps))), torch.randn(5, 4, *[7] * dims)
    before, graph = output(model, x), sec.trace(model, x)
    sec.rotate(model, graph, graph.axes[0], turn(6))
    assert off(model, before, x) < 1e-5
    plain = nn.Sequential(model[0], type(norm)(6, affine=False), model[2]).eval()
    assert "no weight" in sec.rotations(sec.trace(plain, x))[0].why


def batches_for(x: Tensor, n: int = 6) -> list[Tensor]:
    return [torch.randn(16, *x.shape[1:]) for _ in range(n)]


def test_batch_norms_have_the_variance_of_what_is_rotated() -> None:
    model, x = mobilenet()
    batches = batches_for(x)[:4]  # as many as tell
    bases = Bases.of(sec.trace(model, x), batches)
    before = output(model, x)
    with bases.tried() as tried:
        assert tried.matrices
        assert off(model, before, x) < 1e-4
        seen: dict[str, list[Tensor]] = {}
        norms = [f"features.{n}.conv.3" for n in range(2, 18)]
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, given, name=name: seen.setdefault(name, []).append(given[0])
            )
            for name in norms
        ]
        for batch in batches:
            output(model, batch)
        for hook in hooks:
            hook.remove()
        for name in norms:
            rows = torch.cat(seen[name]).transpose(0, 1).flatten(1)
            torch.testing.assert_close(
                model.get_submodule(name).running_var, rows.var(1, correction=0), rtol=2e-2, atol=1e-5
            )
    assert torch.equal(output(model, x), before)


class Thin(nn.Module):
    """A bottleneck with batch norms whose channels are copies of a few directions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.wide = nn.Conv2d(12, 24, 1, bias=False)
        self.out = nn.Conv2d(24, 8, 1)
        self.one.weight.data[:] = (torch.randn(12, 3) @ torch.randn(3, 6)).view(12, 6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.wide(self.norm(self.one(x))).relu())


def thin() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model, batches = Thin(), [torch.randn(16, 6, 5, 5) for _ in range(6)]
    model.norm.running_var.uniform_(0.5, 2)
    model.norm.weight.data.uniform_(0.5, 2)
    model.norm.bias.data.normal_()
    return model.eval(), batches


def test_compress_rotates_through_a_batch_norm_and_the_file_loads(tmp_path) -> None:
    model, batches = thin()
    whole = copy.deepcopy(model)
    plain = copy.deepcopy(model)
    options = {"timed": False, "protect": ("out.weight",)}
    report = sec.compress(model.train(), batches[0], sec.Macs(0.65), batches, **options)
    assert model.training
    assert model.eval().wide.in_channels < 12
    assert "rotated first; batch norms there take the statistics of rotated channels in training mode" in str(report)
    assert report.compensation.after < 1e-9
    sec.compress(plain, batches[0], sec.Macs(0.65), batches, importance=sec.Reconstruction(batches), **options)
    want = output(whole, batches[0])
    assert off(model, want, batches[0]) < 1e-4 < off(plain, want, batches[0])
    assert off(copy.deepcopy(model), want, batches[0]) < 1e-4
    sec.save(model, tmp_path / "thin.safetensors")
    again = sec.load(tmp_path / "thin.safetensors", Thin()).eval()
    assert torch.equal(again(batches[0]), model(batches[0]))


def test_a_failure_on_the_way_leaves_norms_as_they_were(monkeypatch) -> None:
    model, batches = thin()
    before = copy.deepcopy(model.state_dict())

    def fail(model, *_, **__):
        assert not torch.equal(model.norm.running_var, before["norm.running_var"])  # it is rotated by now
        raise MemoryError

    monkeypatch.setattr("secateur.pipeline.compress.apply", fail)
    with pytest.raises(MemoryError):
        sec.compress(model, batches[0], sec.Macs(0.65), batches, timed=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_in_training_mode_is_told_of_as_in_eval_mode() -> None:
    model, batches = thin()
    graph, before = sec.trace(model.train(), batches[0]), copy.deepcopy(model.state_dict())
    assert [rotation.free for rotation in sec.rotations(graph)] == [True, False]
    sec.rotate(model, graph, graph.axes[0], turn(12))
    assert model.training
    model.load_state_dict(before)
    assert torch.equal(model.norm.num_batches_tracked, before["norm.num_batches_tracked"])


def test_half_precision_is_rotated_on_request_alone() -> None:
    model, batches = thin()
    model, batches = model.half(), [batch.half() for batch in batches]
    graph = sec.trace(model, batches[0])
    assert not Bases.of(graph, batches).matrices
    before = output(model, batches[0])
    sec.rotate(model, graph, graph.axes[0], turn(12))
    assert off(model, before, batches[0]) < 1e-2


def test_a_run_that_cannot_be_followed_is_a_reason_and_no_error(monkeypatch) -> None:
    model, batches = thin()

    def fail(runs) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr("secateur.pipeline.folds.structure", fail)
    found = by_tensor(model, batches[0])["one.weight[0]"]
    assert not found.free
    assert "RuntimeError: not here" in found.why
