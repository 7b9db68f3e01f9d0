"""What models do besides layers: sharing, freezing, control flow, checkpoints, devices, precisions, containers."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import Conv2d, Linear
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import secateur as sec
from oracle import Net, axes_at, axis_at, outputs, proved, randomised, reason, sites, sizes_at, tied, to_double, weight

X = torch.randn(2, 6)


def mlp(inside=6, hidden=8, out=3):
    return nn.Sequential(Linear(inside, hidden), nn.ReLU(), Linear(hidden, out))


def test_a_module_used_twice_ties_its_input_to_its_output():
    net = Net(lambda n, x: n.out(n.mid(n.mid(n.a(x)).relu())), a=Linear(6, 8), mid=Linear(8, 8), out=Linear(8, 3))
    assert tied(proved(net, X), ("a.weight", 0), ("mid.weight", 0), ("mid.weight", 1), ("out.weight", 1))


def test_a_module_under_two_names_is_one():
    shared = Linear(8, 8)
    net = Net(lambda n, x: n.out(n.two(n.one(n.a(x)).relu())), a=Linear(6, 8), one=shared, two=shared, out=Linear(8, 3))
    graph = proved(net, X)
    assert tied(graph, ("a.weight", 0), ("one.weight", 0), ("one.weight", 1), ("out.weight", 1))


def test_frozen_parameters_are_cut_and_stay_frozen():
    net = mlp()
    net[0].requires_grad_(False)
    graph = proved(net, X)
    assert tied(graph, ("0.weight", 0), ("2.weight", 1))
    assert not net[0].weight.requires_grad
    assert net[2].weight.requires_grad


def test_branches_without_gradient_are_traced():
    def run(n, x):
        with torch.no_grad():
            h = n.a(x)
        with torch.inference_mode():
            g = n.c(x)
        return n.b(h + g)

    net = Net(run, a=Linear(6, 8), b=Linear(8, 3), c=Linear(6, 8))
    assert tied(proved(net, X), ("a.weight", 0), ("c.weight", 0), ("b.weight", 1))


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Plain:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: {"a": a, "b": [b]}, lambda a, b: Pair(a, b), lambda a, b: Named(a, b),
        lambda a, b: (a, {"x": (b,)}),
        lambda a, b: [Plain(a), b], lambda a, b: torch.distributions.Normal(a, b.exp()),
    ],
    ids=["dict", "dataclass", "named tuple", "nested", "object", "distribution"],
)  # fmt: skip
def test_every_tensor_put_out_keeps_its_width(wrap):
    net = Net(lambda n, x: wrap(n.b(h := n.a(x)), n.c(h)), a=Linear(6, 8), b=Linear(8, 4), c=Linear(8, 4))
    graph = proved(net, X)
    assert [axis.size for axis in graph.axes] == [8]
    assert reason(graph, "b.weight") == reason(graph, "c.weight") == "a dimension of the model's output"


@pytest.mark.parametrize(
    ("example", "get"),
    [
        ({"x": X, "y": X}, None),
        (({"x": X, "y": X},), lambda d: (d["x"], d["y"])),
        ((Pair(X, X),), lambda p: (p.left, p.right)),
        (([X, (X,)],), lambda v: (v[0], v[1][0])),
        ((Named(X, X),), lambda v: v),
    ],
    ids=["keywords", "dict", "dataclass", "list", "named tuple"],
)
def test_inputs_of_every_shape(example, get):
    def run(n, *args, **kwargs):
        x, y = get(*args) if get else (kwargs["x"], kwargs["y"])
        return n.c(n.a(x) * n.b(y))

    net = Net(run, a=Linear(6, 8), b=Linear(6, 8), c=Linear(8, 3))
    assert tied(proved(net, example), ("a.weight", 0), ("b.weight", 0), ("c.weight", 1))


def test_control_flow_that_depends_on_data():
    def run(n, x):
        h = n.a(x)
        steps = 0
        while h.abs().max().item() > 1e-6 and steps < 3:
            h = n.mid(h).tanh() * 0.5
            steps += 1
        return n.b(h) if bool((x.sum() > -1e9).item()) else x

    net = Net(run, a=Linear(6, 8), mid=Linear(8, 8), b=Linear(8, 3))
    assert tied(proved(net, X), ("a.weight", 0), ("mid.weight", 1), ("b.weight", 1))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    net = Net(
        lambda n, x: n.out(checkpoint(n.block, n.a(x), use_reentrant=reentrant)),
        a=Linear(6, 8),
        block=mlp(8, 5, 8),
        out=Linear(8, 3),
    )
    graph = proved(net, X)
    assert tied(graph, ("block.0.weight", 0), ("block.2.weight", 1))
    assert tied(graph, ("a.weight", 0), ("block.0.weight", 1))


def test_checkpointing_in_segments():
    net = Net(lambda n, x: checkpoint_sequential(n.block, 2, x, use_reentrant=False), block=mlp())
    assert tied(proved(net, X), ("block.0.weight", 0), ("block.2.weight", 1))


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        net = nn.Sequential(Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), Linear(8 * 36, 3)).eval()
        example = torch.zeros(2, 3, 8, 8)
    graph = sec.trace(net, example)
    assert sites(axis_at(graph, "0.weight")) >= {"1.running_var[0]", "4.weight[1]"}
    assert all(parameter.is_meta for parameter in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    net = nn.Sequential(Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Conv2d(8, 2, 1)).eval().to(dtype)
    graph = sec.trace(net, torch.zeros(2, 3, 8, 8, dtype=dtype))
    assert [axis.size for axis in graph.axes] == [8]
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    proved(net, torch.randn(2, 3, 8, 8))


def test_mixed_precision_inside():
    net = Net(
        lambda n, x: n.b(n.a(x).to(torch.float64).softmax(0).to(x.dtype).type_as(x)), a=Linear(6, 8), b=Linear(8, 3)
    )
    assert axis_at(proved(net, X), "a.weight").exact is True


@pytest.mark.parametrize("given", [False, True])
def test_tensors_in_plain_attributes_follow_unless_the_model_is_only_given_them(given):
    def run(n, x):
        if not given:
            n.g, n.more["k"][0] = n.g * 1, n.more["k"][0] * 1
        return n.b(n.a(x) * n.g + n.more["k"][0])

    net = Net(run, a=Linear(6, 8), b=Linear(8, 3))
    net.g, net.more = torch.randn(8, dtype=torch.float64), {"k": [torch.randn(8, dtype=torch.float64)]}
    if given:
        reasons = {blocked.reason for blocked in sec.trace(net.double(), to_double(X)).blocked}
        assert any("neither a parameter nor a buffer" in reason for reason in reasons)
    else:
        assert axis_at(proved(net, X), "a.weight").size == 8


def test_a_cache_filled_in_forward_neither_stays_nor_spoils_the_next_run():
    def run(n, x):
        if "bias" not in n.cache:
            n.cache["bias"] = n.p * 2
        return n.b(n.a(x) + n.cache["bias"])

    net = randomised(Net(run, a=Linear(6, 8), b=Linear(8, 3), p=weight(8), cache={}))
    graph = sec.trace(net, to_double(X))
    assert net.cache == {}
    assert tied(graph, ("a.weight", 0), ("p", 0))


@functools.lru_cache
def unit(dtype):
    return torch.ones((), dtype=dtype)


@functools.cache
def half(size):
    return size // 2


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Linear(8, 8), Linear(8, 3)

    def forward(self, x):
        x = torch.cat([x[:, half(x.shape[1]) :], x[:, : half(x.shape[1])]], 1)
        h = self.a(x) * unit(x.dtype)
        k = half(h.shape[1])
        return self.b(torch.cat([h[:, k:], h[:, :k]], 1))


def test_functions_that_remember_their_answers_forget_the_tracing_run():
    net, x = randomised(Cached()), torch.randn(2, 8, dtype=torch.float64)
    before = outputs(net, x)
    unit.cache_clear()
    half.cache_clear()
    graph = sec.trace(net, x)
    assert type(unit(torch.float64)) is torch.Tensor
    assert torch.equal(outputs(net, x)[0], before[0])
    assert sizes_at(graph, "a.weight") == [4, 4], "half() answers with the half of what it was asked for"


def test_buffers_that_count_runs_are_left_alone():
    def run(n, x):
        n.steps += 1
        n.seen = n.seen + x.shape[1]
        return n.b(n.a(x))

    net = Net(run, {"steps": torch.zeros(())}, a=Linear(6, 8), b=Linear(8, 3), seen=0)
    assert axis_at(sec.trace(net, X), "a.weight").size == 8
    assert (net.steps.item(), net.seen) == (0, 0)


def test_what_does_not_run_on_the_example_is_blocked():
    net = Net(lambda n, x: n.b(n.a(x)), a=Linear(6, 8), b=Linear(8, 3), spare=Linear(4, 5))
    assert reason(proved(net, X), "spare.weight") == "not used when the model ran on the example"


def test_what_runs_only_in_training_is_found_there():
    def run(n, x):
        h = n.a(x)
        return (n.b(h), n.aux(h)) if n.training else n.b(h)

    net = Net(run, a=Linear(6, 8), b=Linear(8, 3), aux=Linear(8, 5))
    assert tied(proved(net, X), ("a.weight", 0), ("b.weight", 1), ("aux.weight", 1))


def test_a_mixture_of_experts_by_index():
    def run(n, x):
        choice = n.gate(x).argmax(-1)
        out = torch.zeros(x.shape[0], 3, dtype=x.dtype)
        for i, expert in enumerate(n.experts):
            rows = (choice == i).nonzero().flatten()
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]))
        return out

    net = Net(run, gate=Linear(6, 2), experts=nn.ModuleList([mlp(), mlp(6, 7)]))
    graph = proved(net, torch.randn(12, 6))
    assert sorted(axis.size for axis in graph.axes) == [7, 8]


def test_a_dense_mixture_of_stacked_experts():
    def run(n, x):
        hidden = torch.einsum("bi,eih->beh", x, n.up).relu()
        return torch.einsum("be,beh,eho->bo", n.gate(x).softmax(-1), hidden, n.down)

    graph = proved(Net(run, gate=Linear(6, 4), up=weight(4, 6, 8), down=weight(4, 8, 3)), X)
    assert tied(graph, ("up", 2), ("down", 1))
    assert axis_at(graph, "up", 2).exact
    assert not axis_at(graph, "gate.weight").exact


def test_experts_chosen_by_number_are_blocked():
    def run(n, x):
        return sum(x @ n.up[i] @ n.down[i] for i in range(n.count))

    graph = proved(Net(run, up=weight(3, 6, 8), down=weight(3, 8, 2), count=3), X)
    assert sizes_at(graph, "up", 0) == []
    assert axis_at(graph, "up", 2).size == 8


@pytest.mark.parametrize(
    "pick",
    [
        lambda n, h: h[:, n.order],
        lambda n, h: h.index_select(1, n.order),
        lambda n, h: h.gather(1, n.order.expand(2, -1)),
    ],
)
def test_positions_chosen_by_an_index_stay(pick):
    net = Net(lambda n, x: n.b(pick(n, n.a(x))), {"order": torch.tensor([3, 0, 1, 2])}, a=Linear(6, 4), b=Linear(4, 3))
    assert "chosen by an index" in reason(proved(net, X), "a.weight")


def test_writing_by_index():
    def run(n, x):
        rows = n.p.clone()
        rows[:, n.order] = n.q
        return x @ n.w @ rows

    net = Net(run, {"order": torch.tensor([1, 3])}, p=weight(8, 5), q=weight(8, 2), w=weight(6, 8))
    graph = proved(net, X)
    assert tied(graph, ("p", 0), ("q", 0), ("w", 1))
    assert "chosen by an index" in reason(graph, "order")


def test_a_mask_as_an_index_blocks_what_it_masks():
    net = Net(lambda n, x: (x @ n.w)[:, n.g.abs() > -1] @ n.v, g=weight(8), w=weight(6, 8), v=weight(8, 3))
    graph = proved(net, X)
    assert axes_at(graph, "g") == axes_at(graph, "w", 1) == []


def test_a_function_with_its_own_gradient():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(x.shape[0], 2, -1).transpose(1, 2).reshape(x.shape) * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    net = Net(lambda n, x: n.b(Twice.apply(n.a(x))), a=Linear(6, 8), b=Linear(8, 3))
    assert sizes_at(proved(net, X), "a.weight") == [4]


def test_hooks_run_and_what_they_change_counts():
    net = mlp()
    net[0].register_forward_hook(lambda module, args, out: out * module.gain)
    net[0].gain = weight(8)
    assert tied(proved(net, X), ("0.weight", 0), ("0.gain", 0), ("2.weight", 1))


def test_parameter_lists_and_dicts():
    def run(n, x):
        for w in n.ws:
            x = torch.tanh(x @ w)
        return x * n.scales["out"]

    graph = proved(
        Net(
            run,
            ws=nn.ParameterList([weight(6, 8), weight(8, 5), weight(5, 3)]),
            scales=nn.ParameterDict({"out": weight(3)}),
        ),
        X,
    )
    assert tied(graph, ("ws.0", 1), ("ws.1", 0))
    assert tied(graph, ("ws.1", 1), ("ws.2", 0))


def test_wrapped_models_are_unwrapped():
    graph = sec.trace(torch.compile(mlp()), X)
    assert sites(graph.axes[0]) == {"0.weight[0]", "0.bias[0]", "2.weight[1]"}
    assert sec.trace(nn.DataParallel(mlp()), X).axes[0].size == 8


def test_a_compiled_part_runs_as_it_is_written():
    def rotate(h, k):
        return h.view(h.shape[0], k, -1).transpose(1, 2).flatten(1)

    net = Net(lambda n, x: n.b(torch.compile(rotate)(n.a(x), n.k)), a=Linear(6, 8), b=Linear(8, 3), k=2)
    assert sizes_at(sec.trace(net, X), "a.weight") == [2, 4]


@torch.jit.script
def turned(h: torch.Tensor, k: int) -> torch.Tensor:
    return h.view(h.shape[0], k, -1).transpose(1, 2).flatten(1)


def test_a_scripted_function_runs_as_it_is_written():
    net = Net(lambda n, x: n.b(turned(n.a(x), n.k)), a=Linear(6, 8), b=Linear(8, 3), k=2)
    graph = sec.trace(net, X)
    assert sizes_at(graph, "a.weight") == [2, 4]
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert (net.k, net.b.in_features) == (1, 4)


def test_the_summary_reads_like_a_report():
    text = str(
        sec.trace(Net(lambda n, x: n.b(n.norm(n.a(x))), a=Linear(6, 8), norm=nn.LayerNorm(8), b=Linear(8, 3)), X)
    )
    assert "1 axes can be cut" in text
    assert "inexact: native_layer_norm: a statistic is taken over it" in text
    assert "a dimension of the model's output" in text


def test_a_tiny_real_resnet_and_vit():
    timm = pytest.importorskip("timm")
    graph = proved(timm.create_model("test_resnet", num_classes=5), torch.randn(1, 3, 64, 64), ratios=(0.4,))
    assert len(graph.axes) > 4
    assert not graph.unknown
    graph = proved(timm.create_model("test_vit", num_classes=5), torch.randn(1, 3, 160, 160), ratios=(0.4,))
    assert any(axis.name == "blocks.0.attn heads" for axis in graph.axes)


def test_a_tiny_real_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=20,
    )
    net = Net(lambda n, ids: n.llm(ids, use_cache=False).logits, llm=transformers.LlamaForCausalLM(config))
    graph = proved(net, torch.tensor([[1, 5, 3, 2]]), ratios=(0.4,))
    assert sizes_at(graph, "llm.model.layers.0.self_attn.q_proj.weight")[:2] == [2, 2]
    assert axis_at(graph, "llm.model.layers.1.mlp.up_proj.weight").exact


def test_a_second_run_in_training_mode_costs_nothing():
    """Parameters that eval mode does not use are looked for in training mode; the cost is that of the example's run."""
    net = Net(lambda n, x: n.b(n.a(x)), a=nn.Linear(4, 8), b=nn.Linear(8, 2), unused=nn.Linear(3, 3))
    assert sec.macs(net, torch.zeros(1, 4)) == 48
