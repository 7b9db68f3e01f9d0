"""Files and folders that are opened without a model: built at the cut size, filled, bit for bit what was saved."""

import copy
import functools
import gc
import io
import json
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwinConfig,
    SwinModel,
)

import secateur as sec
from represented import represented
from secateur.errors import SecateurWarning
from secateur.pipeline.rebuild import unlike

WORDS = {"input_ids": torch.arange(3, 13)[None]}
PICTURE = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PRETRAINED = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)), WORDS),
    "bert": (lambda: BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)), WORDS),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
        WORDS,
    ),
    "mixtral": (
        lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)),
        WORDS,
    ),
    "swin": (
        lambda: SwinModel(
            SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        PICTURE,
    ),
}


@functools.cache
def _cut(name: str) -> nn.Module:
    """A cut model, with other counts in each layer."""
    torch.manual_seed(0)
    build, example = PRETRAINED[name]
    model = build().eval()
    plan = sec.plan(sec.trace(model, example, variants=False), sec.Params(0.7))
    assert not plan.fields
    return sec.apply(model, plan, verify=False)


def cut(name: str) -> nn.Module:
    return copy.deepcopy(_cut(name))


def result(model: nn.Module, example: Any) -> Tensor:
    with torch.no_grad():
        out = model(**example) if isinstance(example, dict) else model(example)
    return out if isinstance(out, Tensor) else out[0]


@pytest.mark.parametrize("name", represented(PRETRAINED, by=("gpt2", "mixtral")))
def test_transformers_from_a_file_and_from_a_folder(name: str, tmp_path: Path) -> None:
    check_both_ways(cut(name), PRETRAINED[name][1], tmp_path)


@pytest.mark.parametrize("name", ["llama", "swin"])
def test_tables_that_half_precision_has_rounded(name: str, tmp_path: Path) -> None:
    """Rotary tables and masks come back as they were, not as the constructor makes them."""
    example = {k: v.bfloat16() if v.is_floating_point() else v for k, v in PRETRAINED[name][1].items()}
    check_both_ways(cut(name).bfloat16(), example, tmp_path)


def check_both_ways(model: Any, example: Any, tmp_path: Path) -> None:
    want = result(model, example)
    sec.save(model, tmp_path / "small.safetensors")
    model.save_pretrained(tmp_path / "folder")
    for source in (tmp_path / "small.safetensors", tmp_path / "folder"):
        again = sec.load(source)
        assert type(again) is type(model)
        assert torch.equal(result(again, example), want)
        assert unlike(model, again) is None


def test_what_learns_and_how_it_generates_come_back(tmp_path: Path) -> None:
    model: Any = cut("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    model.generation_config.update(max_new_tokens=3, repetition_penalty=1.5, eos_token_id=[7, 9])
    sec.save(model, tmp_path / "small.safetensors")
    model.save_pretrained(tmp_path / "folder")
    for source in (tmp_path / "small.safetensors", tmp_path / "folder"):
        again = sec.load(source)
        learns = {name: parameter.requires_grad for name, parameter in again.named_parameters()}
        assert [name for name in learns if not learns[name]] == [
            "model.embed_tokens.weight",
            "model.layers.1.mlp.up_proj.weight",
        ]
        assert again.generation_config == model.generation_config
        assert torch.equal(again.generate(**WORDS), model.generate(**WORDS))


@pytest.mark.parametrize("name", PRETRAINED)
def test_from_pretrained_refuses_and_says_what_to_do(name: str, tmp_path: Path) -> None:
    model = cut(name)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert {"config.json", "secateur.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    for opens in (AutoModel.from_pretrained, type(model).from_pretrained):  # type: ignore[attr-defined]
        for more in ({}, {"ignore_mismatched_sizes": True}):
            with pytest.raises(ValueError, match=r"open the folder with secateur\.load\(folder\)"):
                opens(tmp_path, **more)


@pytest.mark.parametrize("name", represented(PRETRAINED, by=("llama", "bert")))
def test_models_that_from_pretrained_opened(name: str, tmp_path: Path) -> None:
    """These differ from freshly built ones in flags and paths, and in nothing that they compute."""
    build, example = PRETRAINED[name]
    first = build()
    first.save_pretrained(tmp_path / "whole")
    model = type(first).from_pretrained(tmp_path / "whole", attn_implementation="eager")
    sec.apply(model, sec.plan(sec.trace(model, example, variants=False), sec.Params(0.7)), verify=False)
    check_both_ways(model, example, tmp_path)


@pytest.mark.parametrize("name", represented(("vit_tiny_patch16_224", "resnet18"), by=("resnet18",)))
def test_timm(name: str, tmp_path: Path) -> None:
    model, example = timm.create_model(name, num_classes=5).eval(), torch.ones(1, 3, 224, 224)
    sec.apply(model, sec.plan(sec.trace(model, example, variants=False), sec.Params(0.7)), verify=False)
    sec.save(model, tmp_path / "file")
    assert torch.equal(result(sec.load(tmp_path / "file"), example), result(model, example))


class Net(nn.Module):
    def __init__(self, width: int, sizes: tuple[int, ...] = (4,), kind: Any = nn.ReLU) -> None:
        super().__init__()
        self.sizes = (*sizes, width)
        self.up, self.act, self.down = nn.Linear(sizes[0], width), kind(), nn.Linear(width, 2)
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) * self.scale


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    net = Net(8, (4,))
    graph = sec.trace(net, torch.ones(1, 4), make=functools.partial(Net, width=8, sizes=(4,)))
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5))).double()
    net.scale.fill_(5.0)
    sec.save(net, tmp_path / "file")
    again = sec.load(tmp_path / "file", make=Net)
    assert torch.equal(again(torch.ones(1, 4).double()), net(torch.ones(1, 4).double()))
    assert again.up.weight.dtype is torch.float64
    assert isinstance(again.sizes, tuple)
    whole = functools.partial(Net, 8)
    assert torch.equal(sec.load(tmp_path / "file", make=whole).up.weight, net.up.weight)
    with pytest.raises(sec.FileError, match=r"what Net\(sizes=\(4,\), width=8\) builds, .*pass what builds it"):
        sec.load(tmp_path / "file")
    with pytest.raises(sec.FileError, match="what Net builds, make= is Linear"):
        sec.load(tmp_path / "file", make=nn.Linear)
    with pytest.raises(sec.FileError, match=r"cuts down\.weight of shape \(2, 8\), here it is \(2, 9\)"):
        sec.load(tmp_path / "file", make=functools.partial(Net, 9))
    with pytest.raises(sec.FileError, match="does not go with one that is there"):
        sec.load(tmp_path / "file", Net(8), make=Net)  # type: ignore[call-overload]
    assert torch.equal(sec.load(tmp_path / "file", Net(8).double()).up.weight, net.up.weight)


def test_arguments_that_are_no_plain_values(tmp_path: Path) -> None:
    net = Net(8, kind=nn.Tanh)
    graph = sec.trace(net, torch.ones(1, 4), make=functools.partial(Net, 8, kind=nn.Tanh))
    sec.save(sec.apply(net, sec.plan(graph, sec.Ratio(0.5))), tmp_path / "file")
    with pytest.raises(sec.FileError, match=r"does not hold the arguments of Net; .*functools\.partial"):
        sec.load(tmp_path / "file", make=Net)
    again = sec.load(tmp_path / "file", make=functools.partial(Net, 8, kind=nn.Tanh))
    assert torch.equal(again(torch.ones(1, 4)), net(torch.ones(1, 4)))


def test_a_model_whose_constructor_is_not_known(tmp_path: Path) -> None:
    sec.save(nn.Linear(2, 2), tmp_path / "file")
    with pytest.raises(sec.FileError, match=r"how a Linear is built is not known.*pass one of full size"):
        sec.load(tmp_path / "file")


def test_what_the_constructor_does_not_make_is_not_silently_another(tmp_path: Path) -> None:
    """The same sizes, another activation: the file does not claim that the constructor builds it."""
    model = cut("bert")
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.Tanh()
    sec.save(model, tmp_path / "file")
    with pytest.raises(sec.FileError, match="is Tanh, its constructor makes it GELU"):
        sec.load(tmp_path / "file")
    model = cut("bert")
    model.bert.encoder.layer[1].output.dropout.p = 0.7
    with pytest.warns(SecateurWarning, match=r"layer\.1\.output\.dropout\.p is 0\.7, its constructor makes it 0\.1"):
        model.save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    with pytest.raises(sec.FileError, match="does not say how the model is built"):
        sec.load(tmp_path / "folder")
    fresh = sec.load(tmp_path / "folder", PRETRAINED["bert"][0]().eval())
    assert torch.equal(result(fresh, WORDS), result(model, WORDS))


def test_the_mode_comes_back(tmp_path: Path) -> None:
    for mode in (True, False):
        sec.save(cut("llama").train(mode), tmp_path / "file")
        assert sec.load(tmp_path / "file").training is mode


def test_cut_again_after_loading(tmp_path: Path) -> None:
    cut("llama").save_pretrained(tmp_path / "one")  # type: ignore[operator]
    model = sec.load(tmp_path / "one")
    sec.apply(model, sec.plan(sec.trace(model, WORDS, variants=False), sec.Params(0.8)), verify=False)
    model.save_pretrained(tmp_path / "two")  # type: ignore[operator]
    assert torch.equal(result(sec.load(tmp_path / "two"), WORDS), result(model, WORDS))


def test_added_biases_are_part_of_it(tmp_path: Path) -> None:
    """Also of a loadable plan: config.json cannot say that a layer has a bias now."""
    torch.manual_seed(0)
    model = PRETRAINED["llama"][0]().eval()
    plan = sec.plan(sec.trace(model, WORDS, variants=False), sec.Params(0.8), loadable=True)
    sec.apply(model, plan, compensate=sec.LeastSquares([WORDS], bias=True), verify=False)
    sec.save(model, tmp_path / "file")
    model.save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    added = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert added
    for source in (tmp_path / "file", tmp_path / "folder"):
        assert torch.equal(result(sec.load(source), WORDS), result(model, WORDS))
    with pytest.raises(ValueError, match=r"secateur\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "folder")


def test_a_loadable_plan_writes_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model = PRETRAINED["llama"][0]().eval()
    sec.apply(model, sec.plan(sec.trace(model, WORDS, variants=False), sec.Params(0.8), loadable=True), verify=False)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "secateur.json").exists()
    assert torch.equal(result(AutoModelForCausalLM.from_pretrained(tmp_path), WORDS), result(model, WORDS))
    with pytest.raises(sec.FileError, match="what from_pretrained opens, open with that"):
        sec.load(tmp_path)
    second = sec.plan(sec.trace(model, WORDS, variants=False), sec.Params(0.8))
    sec.apply(model, second, verify=False)  # of the two together, config.json can no longer tell
    model.save_pretrained(tmp_path)
    assert torch.equal(result(sec.load(tmp_path), WORDS), result(model, WORDS))


def test_an_ordinary_checkpoint_written_over_a_cut_one(tmp_path: Path) -> None:
    cut("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    PRETRAINED["llama"][0]().save_pretrained(tmp_path)
    with pytest.raises(sec.FileError, match="what from_pretrained opens, open with that"):
        sec.load(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_copies_and_pickles_save_themselves(tmp_path: Path) -> None:
    model = cut("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    third = pickle.loads(buffer.getvalue())
    for i, each in enumerate((other, third, model)):
        each.save_pretrained(tmp_path / str(i))
        assert torch.equal(sec.load(tmp_path / str(i)).lm_head.weight, each.lm_head.weight)
    assert not sec.load(tmp_path / "0").lm_head.weight.any()


def test_the_model_goes_when_nobody_holds_it() -> None:
    model = cut("llama")
    held = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert held() is None
    finally:
        gc.enable()


def test_a_checkpoint_that_was_cut_on_disk(tmp_path: Path) -> None:
    """`cut_checkpoint`, also of experts that files hold one by one."""
    for name in ("llama", "mixtral"):
        model = PRETRAINED[name][0]().eval()
        model.save_pretrained(tmp_path / name)
        plan = sec.plan(sec.trace(model, WORDS, variants=False), sec.Params(0.7))
        folder = sec.cut_checkpoint(tmp_path / name, sec.Plan.from_json(plan.to_json()), tmp_path / f"small-{name}")
        sec.apply(model, plan, verify=False)
        assert torch.equal(result(sec.load(folder), WORDS), result(model, WORDS))
        with pytest.raises(ValueError, match=r"secateur\.load"):
            AutoModelForCausalLM.from_pretrained(folder)


def test_pushing_to_a_hub_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(sec.FileError, match="then upload the folder"):
        cut("llama").save_pretrained(tmp_path / "x", push_to_hub=True)  # type: ignore[operator]
    assert not (tmp_path / "x").exists()


def test_a_config_of_two_models(tmp_path: Path) -> None:
    """What a cut writes into a config, it writes into a copy if somebody else has it."""
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    one, two = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    before = copy.deepcopy(config.to_dict())
    sec.apply(one, sec.plan(sec.trace(one, WORDS, variants=False), sec.Params(0.7), loadable=True), verify=False)
    assert config.to_dict() == before == two.config.to_dict()
    assert one.config.to_dict() != before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result(two, WORDS)


def test_the_plan_says_how_the_model_is_built() -> None:
    plan = _cut("llama").__dict__["_secateur_plan"]
    assert (plan.origin.library, plan.origin.name) == ("transformers", "LlamaForCausalLM")
    assert json.loads(plan.origin.arguments)["hidden_size"] == 32
    assert sec.Plan.from_json(plan.to_json()) == plan
