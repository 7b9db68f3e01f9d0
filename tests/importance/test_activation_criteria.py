"""Activation and Wanda against a loop over positions, layers and what each weight is multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from importance_models import MODELS, gone_with, scores, traced
from test_gradient_criteria import batches_for
from torch import Tensor, nn

import secateur as sec
from oracle import Net
from secateur.importance import Activation, Wanda


def inputs_of(graph: sec.Graph, batches: list[Tensor]) -> dict[str, Tensor]:
    """For each layer with a weight, all that its weight is multiplied with, as rows of groups × (weight.shape[1:])."""
    rows: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(layer: Any, args: Any) -> None:
            (x,) = args
            if isinstance(layer, nn.Conv2d):
                x = F.unfold(x, layer.kernel_size, padding=layer.padding).mT.flatten(0, 1)
            rows.setdefault(name, []).append(x.detach().double().reshape(-1, *x.shape[-1:]))

        return note

    handles = []
    for name, layer in graph.model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            handles.append(layer.register_forward_pre_hook(hook(f"{name}.weight")))
    for batch in batches:
        graph.model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(found) for name, found in rows.items()}


def rms(graph: sec.Graph, batches: list[Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """For every element of a weight, the root mean square of what it is multiplied with."""
    found = {}
    for name, rows in inputs_of(graph, batches).items():
        weight = weights[name]
        size = rows.square().mean(0).sqrt()
        groups = size.numel() // weight[0].numel()
        per_group = size.reshape(groups, 1, *weight.shape[1:])
        found[name] = per_group.expand(groups, len(weight) // groups, *weight.shape[1:]).reshape(weight.shape)
    return found


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"recurrent"}))
def test_wanda_sums_weights_times_the_size_of_their_inputs(name: str) -> None:
    graph, batches = traced(name), batches_for(name)
    weights = {n: p.detach().double() for n, p in graph.model.named_parameters()}
    sizes = rms(graph, batches, weights)
    got = scores(graph, Wanda(batches))
    for axis in graph.axes:
        for position in range(axis.size):
            total = 0.0
            for tensor, slices in gone_with(graph, axis, position).items():
                for dim, gone in slices if tensor in sizes else ():
                    for index in gone:
                        carried = weights[tensor].select(dim, index).abs() * sizes[tensor].select(dim, index)
                        total += carried.sum().item()
            assert got[axis.name][position].item() == pytest.approx(total, rel=1e-5), (axis.name, position)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("residual", {"a channels": [("b.weight", 1), ("c.weight", 1)]}),
        ("concat", {"a channels": [("c.weight", 1)], "b channels": [("c.weight", 1)]}),
        ("flattened", {"conv channels": [("head.weight", 1)]}),
    ],
)
def test_activation_is_the_root_mean_square_of_what_is_read(name: str, read: dict[str, Any]) -> None:
    graph, batches = traced(name), batches_for(name)
    weights = {n: p.detach().double() for n, p in graph.model.named_parameters()}
    sizes = rms(graph, batches, weights)
    got = scores(graph, Activation(batches))
    assert set(got) == set(read)
    for axis in graph.axes:
        for position in range(axis.size):
            gone = gone_with(graph, axis, position)
            values = [
                sizes[tensor].select(dim, index)[0].flatten()
                for tensor, dim in read[axis.name]
                for index in dict(gone[tensor])[dim]
            ]
            want = torch.cat(values).square().mean().sqrt().item()
            assert got[axis.name][position].item() == pytest.approx(want, rel=1e-5), (axis.name, position)


def test_groups_of_a_convolution_are_read_group_by_group() -> None:
    graph, batches = traced("grouped"), batches_for("grouped")
    rows = inputs_of(graph, batches)["1.weight"]  # (rows, 8 channels), 4 groups of 2
    of_group = rows.square().mean(0).reshape(4, 2)
    last = inputs_of(graph, batches)["2.weight"].square().mean(0).reshape(4, 3)
    axes = {axis.size: scores(graph, Activation(batches))[axis.name] for axis in graph.axes}
    assert set(axes) == {4, 2, 3}
    assert torch.allclose(axes[2], of_group.mean(0).sqrt())
    assert torch.allclose(axes[3], last.mean(0).sqrt())
    both = (of_group.sum(1) + last.sum(1)) / 5  # read by the grouped convolution and by the one after it
    assert torch.allclose(axes[4], both.sqrt())


def test_what_no_weight_reads_is_looked_at_where_it_is_made() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        return (n.query(x) @ n.key(x).mT).softmax(-1) @ n.value(x)

    torch.manual_seed(0)
    net = Net(run, query=nn.Linear(3, 4), key=nn.Linear(3, 4), value=nn.Linear(3, 2))
    x = torch.randn(5, 3)
    graph = sec.trace(net, x)
    (axis,) = [a for a in graph.axes if a.size == 4]
    made = torch.stack([net.query(x), net.key(x)]).double().square().mean((0, 1)).sqrt()
    assert torch.allclose(scores(graph, Activation([x]))[axis.name], made, rtol=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda k: k.__name__)
def test_hidden_units_of_recurrent_layers_are_read_at_every_step(kind: Any) -> None:
    torch.manual_seed(0)
    net = Net(lambda n, x: n.head(n.rnn(x)[0][:, -1]), rnn=kind(3, 4, batch_first=True), head=nn.Linear(4, 2)).eval()
    batches = [torch.randn(2, 5, 3) for _ in range(2)]
    graph = sec.trace(net, batches[0])
    with torch.no_grad():
        states = torch.stack([net.rnn(batch)[0] for batch in batches])  # (batches, 2, 5, 4)
    before = torch.cat([torch.zeros(2, 2, 1, 4), states[:, :, :-1]], 2)  # what the recurrence reads
    recurrence = before.double().square().mean((0, 1, 2))
    head = states[:, :, -1].double().square().mean((0, 1))
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    (name,) = [axis.name for axis in graph.axes]
    got = scores(graph, Activation(batches))[name]
    assert torch.allclose(got, ((recurrence + head) / 2).sqrt(), rtol=1e-5)

    weights = {n: p.detach().double().abs() for n, p in net.named_parameters()}
    x = torch.stack(batches).double().square().mean((0, 1, 2)).sqrt()
    carried_in = (weights["rnn.weight_ih_l0"] * x).sum(1).reshape(gates, 4).sum(0)
    over = weights["rnn.weight_hh_l0"] * recurrence.sqrt()
    want = carried_in + over.sum(1).reshape(gates, 4).sum(0) + over.sum(0)
    want += (weights["head.weight"] * head.sqrt()).sum(0)
    assert torch.allclose(scores(graph, Wanda(batches))[name], want, rtol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d], ids=lambda k: k.__name__)
def test_convolutions_of_every_kind(kind: Any, stride: int) -> None:
    """A delta at each kernel place in turn: what a weight is multiplied with is what it alone puts out."""
    torch.manual_seed(0)
    layer = kind(2, 3, 3, stride=stride, padding=1, bias=False)
    dims = layer.weight.ndim - 2
    net = nn.Sequential(
        nn.Conv1d(1, 2, 1) if dims == 1 else nn.Conv2d(1, 2, 1) if dims == 2 else nn.Conv3d(1, 2, 1), layer
    )
    x = torch.randn(2, 1, *[5] * dims)
    graph = sec.trace(net, x)
    hidden = net[0](x).detach()
    reads = 1 if kind is not nn.ConvTranspose2d else 0
    want = torch.zeros(2, dtype=torch.float64)
    for channel in range(2):
        for place in range(3**dims):
            alone = torch.zeros_like(layer.weight)
            alone.movedim(reads, 0)[channel, 0].view(-1)[place] = 1.0
            call = getattr(F, {"ConvTranspose2d": "conv_transpose2d"}.get(kind.__name__, kind.__name__.lower()))
            out = call(hidden, alone, stride=stride, padding=1)
            want[channel] += out[:, 0].double().square().mean() / 3**dims
    (axis,) = graph.axes
    assert torch.allclose(scores(graph, Activation([x]))[axis.name], want.sqrt(), rtol=1e-5)


def test_numbers_that_can_be_checked_by_eye() -> None:
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[1.0], [-2.0]])
    net[2].weight.data = torch.tensor([[5.0, 7.0]])
    batches = [torch.tensor([[1.0], [1.0]]), torch.tensor([[-1.0], [7.0]])]
    # Position 0 is 1, 1, 0, 7 (mean square 51/4), position 1 is 0, 0, 2, 0 (mean square 1); x has mean square 13.
    graph = sec.trace(net, batches[0])
    assert scores(graph, Activation(batches))["0 features"].tolist() == pytest.approx([(51 / 4) ** 0.5, 1.0])
    root = 13**0.5
    assert scores(graph, Wanda(batches))["0 features"].tolist() == pytest.approx(
        [root + 5 * (51 / 4) ** 0.5, 2 * root + 7]
    )


def test_parts_of_a_parameter_are_multiplied_with_data_of_their_own() -> None:
    """As the projections of an attention that are packed into one weight."""

    def run(n: Net, x: Tensor) -> Tensor:
        first, second = n.packed.chunk(2)
        return F.linear(n.a(x), first) + F.linear(n.a(10 * x), second)

    torch.manual_seed(0)
    net = Net(run, a=nn.Linear(3, 4, bias=False), packed=nn.Parameter(torch.randn(4, 4)))
    x = torch.randn(5, 3)
    graph = sec.trace(net, x)
    size = net.a(x).detach().double().square().mean(0).sqrt()
    mixed = (x.double().square().mean(0) * (1 + 100) / 2).sqrt()  # a is one layer, which sees both
    weights = {name: tensor.detach().double().abs() for name, tensor in net.named_parameters()}
    want = (weights["a.weight"] * mixed).sum(1) + (weights["packed"][:2] + 10 * weights["packed"][2:]).sum(0) * size
    (axis,) = [axis for axis in graph.axes if axis.size == 4]
    assert torch.allclose(scores(graph, Wanda([x]))[axis.name], want, rtol=1e-5)


def test_half_precision_does_not_overflow() -> None:
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1)).to(torch.bfloat16)
    net[0].weight.data = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    x = torch.full((4, 1), 2.0**100, dtype=torch.bfloat16)
    graph = sec.trace(net, x)
    with pytest.raises(sec.SecateurError, match="not finite"):
        scores(graph, Activation([x]))  # 2^202 is no float32
    x = torch.full((4, 1), 1000.0, dtype=torch.bfloat16)
    assert scores(graph, Activation([x]))["0 features"].tolist() == [1000.0, 2000.0]


def test_both_share_one_pass_over_the_data() -> None:
    read = []

    def batches() -> Any:
        for batch in batches_for("concat"):
            read.append(len(batch))
            yield batch

    sec.plan(traced("concat"), sec.Ratio(0.5), importance=Activation(batches) + Wanda(batches))
    assert len(read) == 3


def test_an_axis_that_no_product_touches_is_said() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.tensor([3.0, 4.0, 1.0])), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.one * self.two).sum(-1)

    graph = sec.trace(Scale(), torch.zeros(2, 1))
    (axis,) = graph.axes
    for criterion in (Activation([torch.ones(2, 1)]), Wanda([torch.ones(2, 1)])):
        with pytest.warns(sec.SecateurWarning, match=f"{axis.name} is scored by Magnitude"):
            got = scores(graph, criterion)[axis.name]
        assert got.argmax() == 1
