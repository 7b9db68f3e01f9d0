"""`Zeros` removes what is zero already, whoever made it so, and never anything that counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.pruning._experimental.pruner import FakeStructuredSparsity
from torch.nn.utils import parametrize
from torch.nn.utils import prune as torch_prune

import secateur as sec
from oracle import Net, difference, outputs, randomised, weight
from secateur import prune

pytestmark = pytest.mark.filterwarnings("ignore:the plan cuts nothing")  # many of these plans are empty on purpose
X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GONE = [1, 3]


def removed(net: nn.Module, example: Any = X, **keywords: Any) -> dict[str, list[int]]:
    """The positions that `Zeros` removes, after a check that removing them changes no output."""
    before = outputs(net, example)
    plan = sec.plan(sec.trace(net, example), sec.Zeros(), **keywords)
    sec.apply(net, plan)
    assert difference(outputs(net, example), before) < 1e-12
    return {axis.name: sorted(set(range(axis.size)) - set(axis.keep)) for axis in plan.axes}


def two_layers(between: nn.Module | None = None) -> nn.Sequential:
    return randomised(nn.Sequential(nn.Linear(4, 8), between or nn.ReLU(), nn.Linear(8, 2)))  # type: ignore[return-value]


# however the zeros came about -----------------------------------------------------------------------------------


def by_hand(layer: nn.Linear) -> None:
    layer.weight.data[GONE] = 0


def by_parametrization(layer: nn.Linear) -> None:
    mask = torch.ones(8, dtype=torch.bool)
    mask[GONE] = False
    parametrize.register_parametrization(layer, "weight", FakeStructuredSparsity(mask))


def by_masks(home: Any) -> Callable[[nn.Linear], None]:
    def apply(layer: nn.Linear) -> None:
        mask = torch.ones(8, 4, dtype=torch.float64)
        mask[GONE] = 0
        home.custom_from_mask(layer, "weight", mask)

    return apply


@pytest.mark.parametrize(
    "zero",
    [by_hand, by_masks(torch_prune), by_masks(prune), by_parametrization],
    ids=["plain", "torch.nn.utils.prune", "secateur.prune", "torch.ao.pruning"],
)
def test_whoever_made_the_zeros(zero: Callable[[nn.Linear], None]) -> None:
    net = two_layers()
    zero(net[0])
    net[0].bias.data[GONE] = 0
    assert removed(net) == {"0 features": GONE}
    assert net[0].weight.shape == (6, 4)


def test_structured_masks_of_weight_and_bias() -> None:
    net = two_layers()
    prune.ln_structured(net[0], "weight", amount=3, n=2, dim=0)
    bias_mask = net[0].weight_mask[:, 0].clone()
    prune.custom_from_mask(net[0], "bias", bias_mask)
    assert removed(net) == {"0 features": bias_mask.eq(0).nonzero().flatten().tolist()}


# who makes, who reads -------------------------------------------------------------------------------------------


def test_a_bias_that_is_not_zero_keeps_its_position() -> None:
    net = two_layers()
    net[0].weight.data[GONE] = 0
    assert removed(net) == {}


def test_what_nobody_reads_goes_whatever_makes_it() -> None:
    for between in (nn.ReLU(), nn.Sigmoid(), nn.BatchNorm1d(8)):
        net = two_layers(between)
        net[2].weight.data[:, GONE] = 0
        assert removed(net) == {"0 features": GONE}


def test_zero_is_not_nothing_after_a_sigmoid() -> None:
    net = two_layers(nn.Sigmoid())
    net[0].weight.data[GONE] = 0
    net[0].bias.data[GONE] = 0
    assert removed(net) == {}


def test_a_statistic_sees_even_what_nobody_reads() -> None:
    net = two_layers(nn.LayerNorm(8))
    net[2].weight.data[:, GONE] = 0
    assert removed(net) == {}


def test_what_is_read_twice_goes_only_when_both_ignore_it() -> None:
    def made() -> nn.Module:
        run = lambda n, x: n.b(n.a(x).relu()) + n.c(n.a(x).relu())  # noqa: E731
        return randomised(Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 2), c=nn.Linear(8, 2)))

    net = made()
    net.b.weight.data[:, GONE] = 0
    assert removed(copy.deepcopy(net)) == {}
    net.c.weight.data[:, [3, 5]] = 0
    assert removed(net) == {"a features": [3]}


def test_data_that_meets_data_is_a_reader_too() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        made = n.a(x)
        return n.b(made) + (made @ made.t()).sum()

    net = randomised(Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 2)))
    net.b.weight.data[:, GONE] = 0
    assert removed(net) == {}
    net.a.weight.data[GONE] = 0
    net.a.bias.data[GONE] = 0
    assert removed(net) == {"a features": GONE}


def test_weights_whose_rows_are_inputs() -> None:
    """GPT-2 keeps its matrices the other way round: the same dimension number means the opposite."""
    run = lambda n, x: (x @ n.up + n.shift).relu() @ n.down  # noqa: E731
    net = randomised(Net(run, up=weight(4, 8), shift=weight(8), down=weight(8, 2)))
    net.up.data[:, GONE] = 0
    assert removed(copy.deepcopy(net)) == {}  # the shift is left
    net.shift.data[GONE] = 0
    assert list(removed(copy.deepcopy(net)).values()) == [GONE]
    net = randomised(Net(run, up=weight(4, 8), shift=weight(8), down=weight(8, 2)))
    net.down.data[GONE] = 0
    assert list(removed(net).values()) == [GONE]


def test_transposed_convolutions_make_along_their_second_dimension() -> None:
    net = randomised(nn.Sequential(nn.ConvTranspose2d(3, 8, 1), nn.ReLU(), nn.ConvTranspose2d(8, 2, 1)))
    net[0].weight.data[:, GONE] = 0
    assert removed(copy.deepcopy(net), IMAGE) == {}
    net[0].bias.data[GONE] = 0
    assert list(removed(net, IMAGE).values()) == [GONE]


def test_embeddings_make_and_tied_ones_make_and_read() -> None:
    tokens = torch.randint(0, 9, (2, 5))
    net = randomised(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 2)))
    net[0].weight.data[:, GONE] = 0
    assert removed(net, tokens) == {"0 features": GONE}
    embedding, out = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
    out.weight = embedding.weight
    place = weight(5, 8)
    tied = randomised(Net(lambda n, i: n.out(n.embedding(i) + n.place), embedding=embedding, out=out, place=place))
    tied.place.data[:, GONE] = 0
    assert removed(copy.deepcopy(tied), tokens) == {}  # the table still makes them
    tied.place.data.normal_()
    tied.embedding.weight.data[:, GONE] = 0
    assert list(removed(tied, tokens).values()) == [GONE]  # and nobody else reads them


def test_a_norm_makes_what_its_input_does_not() -> None:
    for affine in (True, False):
        net = two_layers(nn.BatchNorm1d(8, affine=affine))
        net[0].weight.data[GONE] = 0
        net[0].bias.data[GONE] = 0
        assert removed(copy.deepcopy(net)) == {}  # the shift, or the running mean, is left
        if affine:
            net[1].weight.data[GONE] = 0
            net[1].bias.data[GONE] = 0
        else:
            net[1].running_mean[GONE] = 0
        assert removed(net) == {"0 features": GONE}


def test_units_of_recurrent_layers() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        net = randomised(Net(lambda n, x: n.out(n.rnn(x)[0]), rnn=kind(4, 6), out=nn.Linear(6, 2)))
        rows = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            getattr(net.rnn, name).data.view(rows, 6, -1)[:, GONE] = 0
        assert removed(net, torch.randn(5, 2, 4, dtype=torch.float64)) == {"rnn units": GONE}


def test_heads_of_attention() -> None:
    attention = nn.MultiheadAttention(8, 4, batch_first=True)
    run = lambda n, x: n.head(n.attention(x, x, x, need_weights=False)[0])  # noqa: E731
    net = randomised(Net(run, attention=attention, head=nn.Linear(8, 3)))
    net.attention.out_proj.weight.data.view(8, 4, 2)[:, GONE] = 0
    found = removed(net, torch.randn(2, 5, 8, dtype=torch.float64))
    assert found["attention heads"] == GONE
    assert net.attention.num_heads == 2


# keywords -------------------------------------------------------------------------------------------------------


def test_one_position_is_left_of_an_axis_that_is_all_zero() -> None:
    net = two_layers()
    net[2].weight.data.zero_()
    assert removed(net) == {"0 features": list(range(1, 8))}


def test_round_to_and_protect() -> None:
    def made() -> nn.Module:
        net = two_layers()
        net[2].weight.data[:, GONE] = 0
        return net

    assert removed(made(), round_to=4) == {}
    assert removed(made(), round_to=3) == {"0 features": GONE}
    assert removed(made(), protect=["2"]) == {}


def test_a_model_without_zeros_stays_as_it_is() -> None:
    assert removed(two_layers()) == {}


def test_batch_norm_channels_of_a_real_model() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18().eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for block in (*model.layer1, *model.layer2):
            for vector in (block.bn1.weight, block.bn1.bias):
                vector[::2] = 0
            block.conv1.weight[::2] = 0
    before = sum(p.numel() for p in model.parameters())
    found = removed(model, torch.randn(1, 3, 32, 32, dtype=torch.float64))
    assert len(found) == 4
    assert sum(p.numel() for p in model.parameters()) < before


def test_a_bilinear_layer_reads_what_it_also_makes() -> None:
    """The residual stream is the bilinear layer's input and output; zero columns elsewhere do not make it unread."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.side, self.mix = nn.Linear(3, 4), nn.Linear(4, 2), nn.Bilinear(4, 2, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h + self.mix(h, self.side(h)))

    torch.manual_seed(0)
    net, x = Stream().double(), torch.randn(5, 3, dtype=torch.float64)
    net.side.weight.data[:, 1] = net.last.weight.data[:, 1] = 0
    want = net(x)
    sec.apply(net, sec.plan(sec.trace(net, x), sec.Zeros()))
    assert torch.allclose(net(x), want)
    assert net.first.out_features == 4


def test_a_sum_over_one_of_two_equal_dimensions_reads_it() -> None:
    """Channel 1 is summed over in the products of channels, although they are there in the result too."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last((h[:, :, None] * h[:, None]).sum(2))

    torch.manual_seed(0)
    net, x = Products().double(), torch.randn(5, 3, dtype=torch.float64)
    net.last.weight.data[:, 1] = 0
    want = net(x)
    sec.apply(net, sec.plan(sec.trace(net, x), sec.Zeros()))
    assert torch.allclose(net(x), want)
