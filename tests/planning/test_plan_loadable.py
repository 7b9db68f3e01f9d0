"""Plans that the model's constructor can build: what its own library loads puts out what the cut model does."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import secateur as sec
from secateur.tracing.constructor import constructed
from secateur.tracing.makers import maker_of

TOKENS = {"input_ids": torch.arange(3, 19)[None]}
TEXT = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**TEXT, "intermediate_size": 96, "num_key_value_heads": 2}),
    "bert": ("BertModel", {**TEXT, "intermediate_size": 96}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**TEXT, "intermediate_size": 96, "num_key_value_heads": 2}),
    "t5": (
        "T5EncoderModel",
        {"vocab_size": 128, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96, "num_layers": 2},
    ),
}
EXPLAINED = {
    "llama": {
        "model.layers.0.mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
        "model.layers.1.self_attn.k_proj.weight": ("(num_key_value_heads * head_dim)", "hidden_size"),
    },
    "bert": {
        "encoder.layer.0.attention.self.query.weight": (
            "(num_attention_heads * ((hidden_size / num_attention_heads) // 1))",
            "hidden_size",
        )
    },
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, sizes = SMALL[name]
    model = getattr(transformers, kind)(transformers.AutoConfig.for_model(name, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # zeros would hide mistakes
    return model


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_dimension_is_made_of_fields(name: str) -> None:
    model = _model(name)
    maker = maker_of(model)
    assert maker is not None
    made = constructed(maker, model)
    for tensor, parameter in model.named_parameters():
        assert tuple(sized.size for sized in made.dims[tensor]) == tuple(parameter.shape)
    for tensor, exprs in EXPLAINED[name].items():
        assert tuple(str(sized.expr) for sized in made.dims[tensor]) == exprs


@pytest.mark.parametrize("name", SMALL)
def test_what_from_pretrained_opens_is_the_cut_model(name: str, tmp_path: Path) -> None:
    model = _model(name)
    before = model.config.to_dict()
    plan = sec.plan(sec.trace(model, TOKENS, variants=False), sec.Params(0.8), loadable=True)
    assert plan.fields
    sec.apply(model, plan)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    after = again.config.to_dict()
    assert {key: after[key] for key in before if after[key] != before[key] and key in plan.fields} == plan.fields
    assert {key for key in before if after[key] != before[key]} <= {
        *plan.fields,
        "architectures",
        "_name_or_path",
        "dtype",
    }
    ours, theirs = model.state_dict(), again.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    with torch.no_grad():
        torch.testing.assert_close(again(**TOKENS)[0], model(**TOKENS)[0], rtol=1e-6, atol=1e-6)
    fresh = sum(p.numel() for p in again.parameters())
    assert fresh == plan.params.after <= 0.8 * plan.params.before


def test_in_a_process_that_never_heard_of_it(tmp_path: Path) -> None:
    model = _model("llama")
    sec.apply(model, sec.plan(sec.trace(model, TOKENS, variants=False), sec.Params(0.7), loadable=True))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.save(model(**TOKENS).logits, tmp_path / "logits.pt")
    code = f"""
import sys, torch
try:
    import torchvision
except RuntimeError:  # its own operators are linked to another torch
    sys.modules.pop("torchvision", None)
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{{op}}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
logits = model(input_ids=torch.arange(3, 19)[None]).logits
assert torch.equal(logits, torch.load({str(tmp_path / "logits.pt")!r}, weights_only=True))
assert model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False).shape[1] == 10
assert "secateur" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_layers_keep_equally_many_positions_but_not_the_same() -> None:
    model = _model("llama")
    plan = sec.plan(sec.trace(model, TOKENS, variants=False), sec.Params(0.8), loadable=True)
    kept = [plan.keep[f"model.layers.{i}.mlp.up_proj.weight"][0] for i in range(2)]
    assert len(kept[0]) == len(kept[1]) == plan.fields["intermediate_size"]
    assert kept[0].tolist() != kept[1].tolist()


def test_rotary_tables_are_made_anew_so_they_stay() -> None:
    model = _model("llama")
    plan = sec.plan(sec.trace(model, TOKENS, variants=False), sec.Params(0.6), loadable=True)
    assert not any("inv_freq" in name for name in plan.keep)
    assert "head_dim" not in plan.fields


def test_a_scale_that_the_constructor_computes_keeps_its_width() -> None:
    model = _model("bert")
    plan = sec.plan(sec.trace(model, TOKENS, variants=False), sec.Ratio(0.5), loadable=True)
    heads = plan.fields.get("num_attention_heads", 4)
    assert plan.fields.get("hidden_size", 64) // heads == 16


class Net(nn.Module):
    def __init__(self, width: int = 16, ratio: float = 2.0, blocks: int = 2) -> None:
        super().__init__()
        inner = int(width * ratio)
        self.scale = 0.5
        self.begin = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(blocks)
        )
        self.end = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.end(x)


def test_a_constructor_of_ones_own() -> None:
    torch.manual_seed(0)
    net = Net(width=12, blocks=3)
    graph = sec.trace(net, torch.zeros(1, 8), make=functools.partial(Net, 12, blocks=3))
    plan = sec.plan(graph, sec.Params(0.5), loadable=True)
    assert set(plan.fields) <= {"width", "ratio"}
    assert plan.fields
    sec.apply(net, plan)
    fresh = Net(**{"width": 12, "blocks": 3, **plan.fields})
    fresh.load_state_dict(net.state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(fresh(x), net(x))


def test_plans_with_fields_are_values() -> None:
    net = Net()
    plan = sec.plan(
        sec.trace(net, torch.zeros(1, 8), make=functools.partial(Net, width=16, ratio=2.0)),
        sec.Ratio(0.5),
        loadable=True,
    )
    again = sec.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.fields == plan.fields


class Scaled(Net):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.scale = 1.0 / len(range(width))  # a number that does not tell what it is made of


class Table(Net):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.register_buffer("shift", torch.full((1,), 1.0 / width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


class Listed(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([[0.1] * 8] * 16))  # of data, which no size leads to
        self.two = nn.Parameter(torch.tensor([[0.1] * 16] * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.one).relu(), self.two)


@pytest.mark.parametrize(("kind", "reason"), [(Scaled, "scale"), (Table, "shift"), (Listed, "the cut makes one")])
def test_what_equations_do_not_tell_is_found_by_building(kind: Any, reason: str) -> None:
    graph = sec.trace(kind(), torch.zeros(1, 8), make=functools.partial(kind, width=16))
    with pytest.warns(sec.SecateurWarning, match=reason):
        plan = sec.plan(graph, sec.Ratio(0.5), loadable=True)
    assert not plan.fields
    assert reason in plan.why


class Picky(Net):
    def __init__(self, width: int = 16) -> None:
        if width != 16:
            raise ValueError("only 16 will do")
        super().__init__(16)


def test_a_constructor_that_refuses() -> None:
    graph = sec.trace(Picky(), torch.zeros(1, 8), make=functools.partial(Picky, width=16))
    with pytest.warns(sec.SecateurWarning, match="constructor"):
        assert not sec.plan(graph, sec.Ratio(0.5), loadable=True).fields


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (None, "make="),
        (functools.partial(Net, width=20), "does not build this model"),
        (functools.partial(Net, depth=1), "cannot be called"),
    ],
)
def test_what_says_nothing_of_the_model_is_refused(make: Any, words: str) -> None:
    graph = sec.trace(Net(), torch.zeros(1, 8), make=make)
    with pytest.raises(sec.SecateurError, match=words):
        sec.plan(graph, sec.Ratio(0.5), loadable=True)


def test_make_is_checked_at_once() -> None:
    with pytest.raises(sec.TraceError, match=r"functools\.partial"):
        sec.trace(Net(), torch.zeros(1, 8), make=Net)  # type: ignore[arg-type]


def test_timm_models_are_built_by_create_model() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    name, image = "vit_tiny_patch16_224", torch.randn(1, 3, 32, 32)
    model = timm.create_model(name, img_size=32, depth=2, num_classes=5).eval()
    make = functools.partial(
        timm.create_model, name, img_size=32, depth=2, num_classes=5, embed_dim=192, num_heads=3, mlp_ratio=4.0
    )
    plan = sec.plan(sec.trace(model, image, make=make), sec.Params(0.75), loadable=True)
    assert plan.fields
    assert plan.params.after > 0.7 * plan.params.before  # a head less would be a third of the width
    sec.apply(model, plan)
    fresh = timm.create_model(name, **{"img_size": 32, "depth": 2, "num_classes": 5, **plan.fields}).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(image), model(image))


def _rounded(value: float, divisor: int) -> int:
    new = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return new + divisor if new < 0.9 * value else new


class Inverted(nn.Module):
    """Widths are made of a ratio and rounded to multiples of a number."""

    def __init__(self, ratio: float = 6.0, divisor: int = 8, widths: tuple[int, ...] = (16, 24)) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width in widths:
            inner = _rounded(round(width * ratio), divisor)
            self.layers.append(nn.Sequential(nn.Linear(4, inner), nn.ReLU(), nn.Linear(inner, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("name", "given"),
    [
        pytest.param("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "num_classes": 5}, marks=pytest.mark.slow),
        ("test_vit", {"img_size": 32, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2.5}),
        ("test_convnext", {"dims": (16, 24, 32, 40), "depths": (1, 2, 1, 1), "in_chans": 1}),
    ],
)
def test_timm_models_with_arguments_of_ones_own(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    """What these were is told from the model."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, image = timm.create_model(name, **given).eval(), torch.randn(1, given.get("in_chans", 3), 32, 32)
    plan = sec.plan(sec.trace(model, image, variants=False), sec.Params(0.75), loadable=True)
    sec.apply(model, plan, verify=False)
    fresh = timm.create_model(name, **{**given, **plan.fields}).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(image), model(image))
    sec.save(model, tmp_path / "file")
    assert torch.equal(sec.load(tmp_path / "file").eval()(image), model(image))


def test_a_ratio_that_the_constructor_rounds() -> None:
    net = Inverted()
    graph = sec.trace(net, torch.zeros(1, 4), make=functools.partial(Inverted, ratio=6.0, divisor=8))
    plan = sec.plan(graph, sec.Params(0.75), loadable=True)
    assert set(plan.fields) == {"ratio"}
    sec.apply(net, plan)
    fresh = Inverted(**plan.fields)
    fresh.load_state_dict(net.state_dict())
    x = torch.randn(5, 4)
    assert torch.equal(fresh(x), net(x))
    assert 0.5 < plan.params.after / plan.params.before <= 0.75


class Fixed(Net):
    def __init__(self, width: int = 16) -> None:
        super().__init__(16)


def test_a_budget_out_of_reach_names_what_the_constructor_keeps() -> None:
    graph = sec.trace(Fixed(), torch.zeros(1, 8), make=functools.partial(Fixed, width=16))
    with pytest.raises(sec.PlanError, match=r"cannot be reached.*whatever its arguments"):
        sec.plan(graph, sec.Params(0.5), loadable=True)


class Shortcut(nn.Module):
    """A block has a shortcut where its widths are the same."""

    def __init__(self, width: int = 12, inner: int = 8, *, counted: bool = True) -> None:
        super().__init__()
        self.begin, self.block, self.end = nn.Linear(4, width), nn.Linear(width, inner), nn.Linear(inner, 4)
        self.shortcut = width == inner if counted else len(range(width)) == len(range(inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        return self.end(x + self.block(x) if self.shortcut else self.block(x))


@pytest.mark.parametrize("counted", [True, False])
def test_sizes_with_which_the_constructor_would_take_another_way(counted: bool) -> None:
    net = Shortcut(counted=counted)
    make = functools.partial(Shortcut, width=12, inner=8, counted=counted)
    graph = sec.trace(net, torch.zeros(1, 4), make=make)
    for share in (0.8, 0.6, 0.5):
        plan = sec.plan(graph, sec.Params(share), loadable=True)
        assert {"width": 12, "inner": 8, **plan.fields}["width"] != {"inner": 8, **plan.fields}["inner"]
    sec.apply(net, plan)
    fresh = Shortcut(**{**make.keywords, **plan.fields})
    fresh.load_state_dict(net.state_dict())
    x = torch.randn(5, 4)
    assert torch.equal(fresh(x), net(x))


class Plain(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(8, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(torch.relu(self.begin(x)))


class Unread(Plain):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.unused = width**-0.5


class InFile(Plain):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.register_buffer("shift", torch.from_numpy(np.arange(width).astype(np.float32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(torch.relu(self.begin(x) + self.shift))


class Trying(Plain):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.end = nn.Linear(self.begin(torch.zeros(1, 8)).shape[-1], 3)  # it runs layers to see what they put out


@pytest.mark.parametrize("kind", [Unread, InFile, Trying])
def test_what_keeps_no_constructor_from_building_it(kind: Any) -> None:
    net = kind()
    graph = sec.trace(net, torch.zeros(1, 8), make=functools.partial(kind, width=16))
    plan = sec.plan(graph, {"begin": 0.5}, loadable=True)
    assert plan.fields["width"] == 8
    sec.apply(net, plan)
    fresh = kind(width=8)
    fresh.load_state_dict(net.state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(fresh(x), net(x))
