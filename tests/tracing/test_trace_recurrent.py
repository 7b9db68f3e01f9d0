"""LSTM, GRU and RNN: layers, directions, projections, states, packed sequences, cells in a loop."""

import pytest
import torch
from torch import nn
from torch.nn import Linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oracle import Net, axes_at, axis_at, proved, reason, sites, sizes_at, tied, weight

X = torch.randn(4, 3, 6)
KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda k: k.__name__)


@KINDS
@pytest.mark.parametrize("bias", [True, False])
def test_one_layer(kind, bias):
    net = Net(lambda n, x: n.out(n.rnn(n.a(x))[0]), a=Linear(6, 7), rnn=kind(7, 5, bias=bias), out=Linear(5, 2))
    graph = proved(net, X)
    hidden = axis_at(graph, "rnn.weight_hh_l0", 1)
    assert hidden.size == 5
    assert hidden.exact
    assert {"rnn.weight_ih_l0[0]", "rnn.weight_hh_l0[0]", "rnn.weight_hh_l0[1]", "out.weight[1]"} <= sites(hidden)
    assert ("rnn.bias_ih_l0[0]" in sites(hidden)) is bias
    assert tied(graph, ("a.weight", 0), ("rnn.weight_ih_l0", 1))


@KINDS
def test_layers_share_a_count_and_not_their_positions(kind):
    net = Net(lambda n, x: n.out(n.rnn(x)[0]), rnn=kind(6, 5, 3, batch_first=True), out=Linear(5, 2))
    graph = proved(net, X)
    first, second, third = (axis_at(graph, f"rnn.weight_hh_l{i}", 1) for i in range(3))
    assert len({first, second, third}) == 3
    assert tied(graph, ("rnn.weight_ih_l1", 1), ("rnn.weight_hh_l0", 1))
    assert graph.constraints


@KINDS
def test_both_directions(kind):
    net = Net(lambda n, x: n.out(n.rnn(x)[0]), rnn=kind(6, 5, 2, bidirectional=True), out=Linear(10, 2))
    graph = proved(net, X)
    forward, backward = axis_at(graph, "rnn.weight_hh_l0", 1), axis_at(graph, "rnn.weight_hh_l0_reverse", 1)
    assert forward is not backward
    assert axes_at(graph, "rnn.weight_ih_l1", 1) == [forward, backward]
    assert sizes_at(graph, "out.weight", 1) == [5, 5]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_projections(layers, both):
    lstm = nn.LSTM(6, 7, layers, proj_size=4, bidirectional=both)
    graph = proved(Net(lambda n, x: n.out(n.rnn(x)[0]), rnn=lstm, out=Linear(8 if both else 4, 2)), X)
    assert axis_at(graph, "rnn.weight_hr_l0", 1).size == 7
    assert tied(graph, ("rnn.weight_hr_l0", 0), ("rnn.weight_hh_l0", 1))


def last_hidden(n, x):
    return n.out(n.rnn(x)[1][0][-1])


def both_ends(n, x):
    hidden = n.rnn(x)[1][0]
    return n.out(torch.cat([hidden[-2], hidden[-1]], -1))


def cell_state(n, x):
    _, (hidden, cell) = n.rnn(x)
    return n.out(hidden[-1] + cell[0])


def all_hidden(n, x):
    return n.out(n.rnn(x)[1][0].sum(0))


def viewed(n, x):
    hidden = n.rnn(x)[1][0]
    return n.out(hidden.view(n.rnn.num_layers, 1, x.shape[1], n.rnn.hidden_size)[-1, 0])


@pytest.mark.parametrize(
    ("run", "width"),
    [(last_hidden, 5), (both_ends, 10), (cell_state, 5), (all_hidden, 5), (viewed, 5)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_final_states_that_are_used(run, width):
    graph = proved(Net(run, rnn=nn.LSTM(6, 5, 2), out=Linear(width, 2)), X)
    assert all(axis.exact for axis in graph.axes)
    apart = run in (last_hidden, both_ends)
    assert tied(graph, ("rnn.weight_hh_l0", 1), ("rnn.weight_hh_l1", 1)) is not apart


def test_final_states_put_out_are_blocked():
    graph = proved(Net(lambda n, x: n.rnn(x), rnn=nn.GRU(6, 5)), X)
    assert reason(graph, "rnn.weight_hh_l0", 1) == "a dimension of the model's output"


@KINDS
def test_initial_states_that_are_given_block(kind):
    states = torch.randn(1, 3, 5)
    example = (X, (states, states)) if kind is nn.LSTM else (X, states)
    graph = proved(Net(lambda n, x, s: n.out(n.rnn(x, s)[0]), rnn=kind(6, 5), out=Linear(5, 2)), example)
    assert reason(graph, "rnn.weight_hh_l0", 1) == "a dimension of the model's input"


@pytest.mark.parametrize("layers", [1, 2])
def test_initial_states_that_are_learned_follow(layers):
    def run(n, x):
        return n.out(n.rnn(x, (n.h.expand(-1, 3, -1).contiguous(), n.c.expand(-1, 3, -1).contiguous()))[0])

    net = Net(run, rnn=nn.LSTM(6, 5, layers), out=Linear(5, 2), h=weight(layers, 1, 5), c=weight(layers, 1, 5))
    graph = proved(net, X)
    assert tied(graph, ("h", 2), ("c", 2), ("rnn.weight_hh_l0", 1), (f"rnn.weight_hh_l{layers - 1}", 1))


def test_initial_states_of_zeros_made_in_forward():
    def run(n, x):
        zeros = torch.zeros(1, x.shape[1], n.rnn.hidden_size, dtype=x.dtype)
        return n.out(n.rnn(x, (zeros, zeros))[0])

    assert axis_at(proved(Net(run, rnn=nn.LSTM(6, 5), out=Linear(5, 2)), X), "rnn.weight_hh_l0", 1).exact


def test_initial_states_from_another_layer():
    net = Net(
        lambda n, x: n.out(n.rnn(x, n.start(x[0])[None].tanh())[0]),
        rnn=nn.GRU(6, 5),
        out=Linear(5, 2),
        start=Linear(6, 5),
    )
    assert tied(proved(net, X), ("start.weight", 0), ("rnn.weight_hh_l0", 1), ("out.weight", 1))


def test_an_encoder_hands_its_state_to_a_decoder():
    net = Net(
        lambda n, x: n.out(n.dec(x, n.enc(x)[1])[0]),
        enc=nn.LSTM(6, 5, 2),
        dec=nn.LSTM(6, 5, 2),
        out=Linear(5, 2),
    )
    assert tied(proved(net, X), ("enc.weight_hh_l0", 1), ("dec.weight_hh_l0", 1))


@KINDS
def test_packed_sequences(kind):
    def run(n, x, lengths):
        packed = pack_padded_sequence(n.a(x), lengths, enforce_sorted=False)
        out, _ = n.rnn(packed)
        return n.out(pad_packed_sequence(out)[0])

    net = Net(run, a=Linear(6, 7), rnn=kind(7, 5, bidirectional=True), out=Linear(10, 2))
    graph = proved(net, (X, torch.tensor([2, 4, 1])))
    assert sizes_at(graph, "out.weight", 1) == [5, 5]
    assert tied(graph, ("a.weight", 0), ("rnn.weight_ih_l0", 1), ("rnn.weight_ih_l0_reverse", 1))


def test_a_packed_sequence_as_the_input():
    packed = pack_padded_sequence(X, torch.tensor([4, 3, 1]))
    graph = proved(Net(lambda n, x: n.out(n.rnn(x)[1][-1]), rnn=nn.GRU(6, 5), out=Linear(5, 2)), (packed,))
    assert axis_at(graph, "out.weight", 1).size == 5


def test_a_sequence_without_a_batch():
    graph = proved(Net(lambda n, x: n.out(n.rnn(x)[0]), rnn=nn.LSTM(6, 5), out=Linear(5, 2)), X[:, 0])
    assert axis_at(graph, "out.weight", 1).exact


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda k: k.__name__)
@pytest.mark.parametrize("start", ["nothing", "zeros"])
def test_cells_in_a_loop(kind, start):
    def run(n, x):
        state = None
        if start == "zeros":
            zeros = torch.zeros(x.shape[1], n.cell.hidden_size, dtype=x.dtype)
            state = (zeros, zeros) if kind is nn.LSTMCell else zeros
        for step in n.a(x):
            state = n.cell(step, state)
        return n.out(state[0] if kind is nn.LSTMCell else state)

    graph = proved(Net(run, a=Linear(6, 7), cell=kind(7, 5), out=Linear(5, 2)), X)
    assert axis_at(graph, "cell.weight_hh", 1).exact
    assert tied(graph, ("cell.weight_hh", 1), ("out.weight", 1))
    assert tied(graph, ("a.weight", 0), ("cell.weight_ih", 1))


def test_a_convolution_before_and_attention_after():
    def run(n, x):
        h, _ = n.rnn(n.conv(x.transpose(1, 2)).transpose(1, 2))
        return n.out((n.score(h).softmax(0) * h).sum(0))

    net = Net(
        run,
        conv=nn.Conv1d(6, 7, 1),
        rnn=nn.LSTM(7, 5, bidirectional=True),
        score=Linear(10, 1),
        out=Linear(10, 2),
    )
    graph = proved(net, X)
    assert tied(graph, ("conv.weight", 0), ("rnn.weight_ih_l0", 1))
    assert axes_at(graph, "score.weight", 1) == axes_at(graph, "out.weight", 1)
