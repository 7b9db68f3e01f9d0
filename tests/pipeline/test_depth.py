"""Whole blocks that go: what is left puts out what the uncut model does when these hand on their input."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torchvision.models import resnet18
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import secateur as sec
from represented import represented

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 31}
WORDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def llama(layers=4):
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, num_key_value_heads=1, **SMALL))


def qwen():
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    more = {"use_sliding_window": True, "sliding_window": 3, "layer_types": kinds, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=4, **more, **SMALL))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=31, n_positions=32))


def bert():
    return BertModel(BertConfig(num_hidden_layers=4, max_position_embeddings=16, **SMALL))


def vit():
    more = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    small = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=4, **more, **small))


def t5():
    small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 31}
    return T5ForConditionalGeneration(T5Config(num_layers=4, num_decoder_layers=4, **small))


def made(build, seed=0):
    torch.manual_seed(seed)
    model = build().eval()
    for parameter in model.parameters():  # so that no block is as good as nothing
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


IMAGE = {"pixel_values": torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8).contiguous()}
MODELS = {
    "llama": (llama, {"input_ids": WORDS}, ("model.layers.0", "model.layers.2"), {"num_hidden_layers": 2}),
    "qwen": (
        qwen,
        {"input_ids": WORDS},
        ("model.layers.0",),
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt2": (gpt2, {"input_ids": WORDS}, ("transformer.h.1", "transformer.h.3"), {"n_layer": 2}),
    "bert": (bert, {"input_ids": WORDS}, ("encoder.layer.0",), {"num_hidden_layers": 3}),
    "vit": (vit, IMAGE, ("vit.layers.1", "vit.layers.2"), {"num_hidden_layers": 2}),
    "t5": (
        t5,
        {"input_ids": WORDS, "decoder_input_ids": WORDS},
        ("encoder.block.2", "decoder.block.1", "decoder.block.3"),
        {"num_layers": 3, "num_decoder_layers": 2},
    ),
}


def outputs(model, example):
    with torch.no_grad():
        out = model(**example) if isinstance(example, dict) else model(example)
    return out if isinstance(out, torch.Tensor) else out[0]


def without(model, names, example):
    """What a model puts out when some blocks return their first argument, in the form in which they return it."""
    kept = {}
    for name in names:
        block = model.get_submodule(name)
        kept[name] = block.register_forward_hook(_first, with_kwargs=True)
    try:
        return outputs(model, example)
    finally:
        for hook in kept.values():
            hook.remove()


def _first(_module, args, kwargs, out):
    x = args[0] if args else kwargs["hidden_states"]
    return x if isinstance(out, torch.Tensor) else (x, *out[1:])


@pytest.mark.parametrize("which", represented(MODELS, by=("llama", "bert", "resnet")))
def test_what_is_left_is_the_model_whose_blocks_hand_on_their_input(which, tmp_path) -> None:
    build, example, names, fields = MODELS[which]
    model = made(build)
    want = without(model, names, example)
    assert not torch.allclose(want, outputs(model, example), atol=1e-3)
    before = sum(parameter.numel() for parameter in model.parameters())
    graph = sec.trace(model, example, variants=False)
    plan = sec.plan_depth(graph, names, loadable=True)
    assert dict(plan.fields) == fields
    assert sec.Plan.from_json(plan.to_json()) == plan
    sec.apply(model, plan)
    assert torch.allclose(outputs(model, example), want, atol=1e-5)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert (plan.params.before, plan.params.after) == (before, after)
    assert plan.macs.after == sec.macs(model, example)
    model.save_pretrained(tmp_path / "folder")
    opened = type(model).from_pretrained(tmp_path / "folder").eval()
    assert torch.equal(outputs(opened, example), outputs(model, example))
    sec.save(model, tmp_path / "small.safetensors")
    for again in (sec.load(tmp_path / "small.safetensors"), sec.load(tmp_path / "small.safetensors", made(build, 1))):
        assert torch.equal(outputs(again, example), outputs(model, example))
        assert {name: getattr(again.config, name) for name in fields} == fields


@pytest.mark.parametrize("which", represented(("llama", "qwen", "gpt2"), by=("llama",)))
def test_generation_with_a_cache_goes_on(which, tmp_path) -> None:
    build, example, names, _ = MODELS[which]
    model = made(build)
    plan = sec.plan_depth(sec.trace(model, example, variants=False), names)
    sec.apply(model, plan)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    fast, slow = (model.generate(WORDS, use_cache=cache, **how) for cache in (True, False))
    assert torch.equal(fast, slow)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).generate(WORDS, **how), fast)
    with pytest.raises(sec.FileError, match="widths only"):
        sec.cut_checkpoint(tmp_path, plan, tmp_path / "out")


def test_blocks_are_found_and_others_say_why_not() -> None:
    found = {block.name: block for block in sec.blocks(sec.trace(made(t5), MODELS["t5"][1], variants=False))}
    assert [name for name in found if found[name].free and name.startswith("enc")] == [
        f"encoder.block.{i}" for i in (1, 2, 3)
    ]
    assert "besides" in found["encoder.block.0"].why  # it makes the position bias for all
    net = resnet18(num_classes=4).eval()
    found = {block.name: block for block in sec.blocks(sec.trace(net, torch.zeros(1, 3, 32, 32), variants=False))}
    free = [name for name, block in found.items() if block.free]
    assert free == ["layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1"]
    assert "puts out" in found["layer2.0"].why
    assert found["layer1.0"].params == sum(p.numel() for p in net.layer1[0].parameters())
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
    assert [(b.name, b.free, b.why) for b in sec.blocks(sec.trace(plain, torch.ones(2, 4)))] == [
        ("0", False, "what it puts out is not what it takes plus something"),
        ("2", False, "what it puts out is not what it takes plus something"),
        ("3", False, "it adds nothing to what it takes"),
    ]


def test_a_resnet_trains_on_with_its_optimizer_and_is_loaded_again(tmp_path) -> None:
    torch.manual_seed(0)
    net, x = resnet18(num_classes=4), torch.randn(2, 3, 32, 32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(x).square().mean().backward()
    optimizer.step()
    net.eval()
    want = without(net, ("layer1.0", "layer3.1"), x)
    graph = sec.trace(net, x, variants=False)
    sec.apply(net, sec.plan_depth(graph, ["layer1.0", "layer3.1"]), optimizer=optimizer)
    assert torch.allclose(outputs(net, x), want, atol=1e-5)
    assert [len(stage) for stage in (net.layer1, net.layer2, net.layer3, net.layer4)] == [1, 2, 1, 2]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters()} == {id(p) for p in optimizer.state}
    sec.save(net, tmp_path / "small.safetensors")
    again = sec.load(tmp_path / "small.safetensors", resnet18(num_classes=4).eval())
    assert torch.equal(outputs(again, x), outputs(net, x))
    before = net.layer1[0].conv1.weight.clone()
    net.train()(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, net.layer1[0].conv1.weight)


class Residual(nn.Module):
    def __init__(self, width, layer_idx, scale=1.0):
        super().__init__()
        self.inner, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.layer_idx, self.scale = layer_idx, scale

    def forward(self, x, log=None):
        if log is not None:
            log.append(self.layer_idx)
        return x + self.scale * self.out(self.inner(x).relu())


class Counted(nn.Module):
    """Code that counts its blocks by a number of its own."""

    def __init__(self, width=4, n_layers=4, scales=(1.0, 0.01, 1.0, 0.02)):
        super().__init__()
        self.n_layers = n_layers
        self.layers = nn.ModuleList([Residual(width, i, scale) for i, scale in enumerate(scales)])
        self.head = nn.Linear(width, 3)

    def forward(self, x, log=None):
        for i in range(self.n_layers):
            x = self.layers[i](x, log)
        return self.head(x)


def test_blocks_go_by_what_the_outputs_lose_and_numbers_follow_in_any_code() -> None:
    torch.manual_seed(0)
    net, batches = Counted(), [torch.randn(16, 4) for _ in range(2)]
    plan = sec.plan_depth(sec.trace(net, batches[0]), 2, batches)
    assert set(plan.removed.blocks) == {"layers.1", "layers.3"}
    want = without(net, plan.removed.blocks, batches[0])
    sec.apply(net, plan)
    assert torch.allclose(outputs(net, batches[0]), want, atol=1e-6)
    log: list[int] = []
    net(batches[0], log)
    assert (net.n_layers, log) == (2, [0, 1])


def test_widths_and_blocks_go_one_after_the_other_and_are_one_plan(tmp_path) -> None:
    torch.manual_seed(0)
    net, x = Counted(), torch.randn(16, 4)
    sec.apply(net, sec.plan(sec.trace(net, x), sec.Ratio(0.5)))
    sec.apply(net, sec.plan_depth(sec.trace(net, x), ["layers.1"]))
    sec.apply(net, sec.plan(sec.trace(net, x), sec.Ratio(0.5)))
    sec.apply(net, sec.plan_depth(sec.trace(net, x), ["layers.1"]))
    assert [tuple(layer.inner.weight.shape) for layer in net.layers] == [(2, 4), (2, 4)]
    sec.save(net, tmp_path / "small.safetensors")
    again = sec.load(tmp_path / "small.safetensors", Counted())
    assert torch.equal(outputs(again, x), outputs(net, x))
    assert [layer.layer_idx for layer in again.layers] == [0, 1]
    plan = net.__dict__["_secateur_plan"]
    assert plan.removed.blocks == ("layers.1", "layers.2")
    assert [axis.name for axis in plan.axes] == ["layers.0 hidden", "layers.1 hidden"]
    whole = Counted()
    whole.load_state_dict(Counted().state_dict())
    other = sec.apply(whole, sec.Plan.from_json(plan.to_json()), verify=False)
    assert [tuple(layer.inner.weight.shape) for layer in other.layers] == [(2, 4), (2, 4)]


def test_the_rest_is_refitted_to_the_uncut_model() -> None:
    torch.manual_seed(0)
    net = Counted(width=8, scales=(0.5, 0.5, 0.5, 0.5))
    batches = [torch.randn(64, 8) for _ in range(8)]
    whole = copy.deepcopy(net)
    plan = sec.plan_depth(sec.trace(net, batches[0]), ["layers.1"])
    sec.apply(net, plan, compensate=sec.LeastSquares(batches))
    outcome = sec.outcome(net)
    assert outcome.after < 0.5 * outcome.before
    fresh = torch.randn(64, 8)
    want = outputs(whole, fresh)
    off, plain = outputs(net, fresh) - want, without(whole, ["layers.1"], fresh) - want
    assert off.square().sum() < 0.5 * plain.square().sum()


def test_compress_removes_blocks_and_cuts_widths_for_the_rest(tmp_path) -> None:
    torch.manual_seed(0)
    net, batches = Counted(width=8), [torch.randn(64, 8) for _ in range(8)]
    whole, fresh = copy.deepcopy(net), torch.randn(64, 8)
    report = sec.compress(net, batches[0], sec.Macs(0.45), batches, blocks=(0, 2), timed=False)
    assert report.plan.removed.blocks == ("layers.1", "layers.3")
    assert "without 2 blocks" in report.why[-1]
    assert report.macs.after <= 0.45 * report.macs.before == 0.45 * sec.macs(whole, batches[0])
    assert report.macs.after == report.plan.macs.after == sec.macs(net, batches[0])
    narrow = copy.deepcopy(whole)
    sec.compress(narrow, batches[0], sec.Macs(0.45), batches, timed=False)
    off, near = ((outputs(model, fresh) - outputs(whole, fresh)).square().sum() for model in (narrow, net))
    assert near < off
    sec.save(net, tmp_path / "small.safetensors")
    again = sec.load(tmp_path / "small.safetensors", Counted(width=8))
    assert torch.equal(outputs(again, fresh), outputs(net, fresh))
    before = copy.deepcopy(whole.state_dict())
    with pytest.raises(sec.SecateurError):
        sec.compress(whole, batches[0], sec.Macs(1e-3), batches, blocks=1, timed=False)
    assert len(whole.layers) == 4 == whole.n_layers
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.state_dict().items())


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual(4, i) for i in range(3)])

    def forward(self, x):
        return self.layers[2](self.layers[1](self.layers[0](x)))


class Zipped(ByName):
    def __init__(self):
        super().__init__()
        self.gains = [1.0, 2.0, 3.0]

    def forward(self, x):
        for layer, gain in zip(self.layers, self.gains, strict=False):
            x = gain * layer(x)
        return x


@pytest.mark.parametrize("kind", [ByName, Zipped])
def test_what_would_come_out_wrong_is_refused_and_nothing_has_changed(kind) -> None:
    torch.manual_seed(0)
    net, x = kind(), torch.randn(2, 4)
    optimizer = torch.optim.Adam(net.parameters())
    plan = sec.plan_depth(sec.trace(net, x), ["layers.0"])
    before, modules, want = copy.deepcopy(net.state_dict()), list(net.modules()), outputs(net, x)
    with pytest.raises(sec.VerifyError):
        sec.apply(net, plan, optimizer=optimizer)
    assert list(net.modules()) == modules
    assert net.layers[2].layer_idx == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))
    assert torch.equal(outputs(net, x), want)


def test_a_scale_made_of_the_index_stays_so_no_constructor_builds_it(tmp_path) -> None:
    config = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 32}

    def build():
        return GPT2LMHeadModel(GPT2Config(scale_attn_by_inverse_layer_idx=True, **config))

    model, example = made(build), MODELS["gpt2"][1]
    graph = sec.trace(model, example, variants=False)
    with pytest.raises(sec.PlanError, match="scal"):
        sec.plan_depth(graph, ["transformer.h.0"], loadable=True)
    want = without(model, ["transformer.h.0"], example)
    plan = sec.plan_depth(graph, ["transformer.h.0"])
    assert not plan.loadable
    sec.apply(model, plan)
    assert torch.allclose(outputs(model, example), want, atol=1e-5)
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="was cut with Secateur"):
        GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(outputs(sec.load(tmp_path, made(build, 1)), example), outputs(model, example))


def test_a_constructor_of_ones_own_builds_what_is_left() -> None:
    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.layers = nn.Sequential(*(Residual(width, i) for i in range(depth)))

        def forward(self, x):
            return self.layers(x)

    net, x = Net(4, 3), torch.randn(2, 4)
    graph = sec.trace(net, x, make=functools.partial(Net, width=4, depth=3))
    plan = sec.plan_depth(graph, ["layers.1"], loadable=True)
    assert plan.loadable
    assert dict(plan.fields) == {"depth": 2}
    with pytest.raises(sec.PlanError, match="how it is built is not known"):
        sec.plan_depth(sec.trace(net, x), ["layers.1"], loadable=True)


def test_what_is_asked_wrongly_is_refused() -> None:
    net, x = Counted(), torch.randn(2, 4)
    graph = sec.trace(net, x)
    for remove, said in (
        (["head"], "no block"),
        ("layers.1", "list of names"),
        (-1, "from 0 on"),
        (1, "needs batches"),
        ([f"layers.{i}" for i in range(4)], "one block of each list stays"),
    ):
        with pytest.raises(sec.PlanError, match=said):
            sec.apply(net, sec.plan_depth(graph, remove))
    assert sec.plan_depth(graph, 1, [x], protect="layers.[13]").removed.blocks[0] in ("layers.0", "layers.2")
    with pytest.raises(sec.PlanError, match="protected"):
        sec.plan_depth(graph, ["layers.1"], protect="layers.1.out")
    with pytest.raises(sec.PlanError, match="4 blocks cannot go"):
        sec.plan_depth(graph, 4, [x])
    with pytest.raises(sec.PlanError, match="does not have"):
        sec.apply(nn.Sequential(nn.Linear(4, 4)), sec.plan_depth(graph, ["layers.1"]))


def test_compress_finds_how_many_blocks_go() -> None:
    torch.manual_seed(0)
    net, batches = Counted(width=8), [torch.randn(64, 8) for _ in range(8)]
    report = sec.compress(net, batches[0], sec.Macs(0.45), batches, blocks="auto", timed=False)
    assert report.macs.after <= 0.45 * report.macs.before
    gone, tried = len(report.plan.removed.blocks), report.why[-1]
    assert gone >= 1  # two of its blocks do next to nothing
    assert f"without {gone} blocks" in tried
    assert "without 0 blocks" in tried
    with pytest.raises(sec.PlanError, match="blocks is how many"):
        sec.compress(Counted(width=8), batches[0], sec.Macs(0.45), batches, blocks="all", timed=False)
