"""Reasons that are told: of numbers without an origin, of factors, of arguments that the example leaves out."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import Linear

import secateur as sec
from oracle import Net, reason

X = torch.randn(2, 6)


def of_property(n, x):
    """The widths of a config, one by way of a float, are compared with what comes out."""
    h = n.a(x)
    assert h.shape[-1] == n.config.width
    wide = n.up(h)
    assert wide.shape[-1] == int(n.config.width * n.config.ratio), "bad"
    return n.b(wide)


def test_a_number_by_way_of_a_float_is_no_literal_and_what_it_is_made_of_stays_whole():
    config = SimpleNamespace(width=8, ratio=1.5)
    graph = sec.trace(Net(of_property, a=Linear(6, 8), up=Linear(8, 12), b=Linear(12, 3), config=config), X)
    line = of_property.__code__.co_firstlineno + 5
    assert reason(graph, "up.weight", 0).startswith(
        f"where the 12 at test_trace_told.py:{line} comes from is not known"
    )
    assert reason(graph, "a.weight", 0) == (
        f"with fewer of them the model fails: AssertionError: bad (test_trace_told.py:{line})"
    )


def test_a_rehearsal_spares_as_few_axes_as_will_do():
    """Heads and their dims are not both halved where the width is; were all spared, nothing would be rehearsed."""

    def run(n, x):
        h = n.a(x)
        h = h + n.o(n.q(h).view(x.shape[0], n.config.heads, n.config.width // n.config.heads).relu().flatten(1))
        wide = n.up(h)
        assert h.shape[-1] == n.config.width
        assert wide.shape[-1] == int(n.config.width * 2.5), "bad"
        return n.b(wide)

    config = SimpleNamespace(width=12, heads=3)
    parts = {"a": Linear(6, 12), "q": Linear(12, 12), "o": Linear(12, 12), "up": Linear(12, 30), "b": Linear(30, 3)}
    graph = sec.trace(Net(run, config=config, **parts), X)
    assert reason(graph, "a.weight", 0).startswith("with fewer of them the model fails: AssertionError: bad")


def test_a_factor_that_an_attribute_holds_is_told():
    """ALiBi: a slope for each head is a tensor of numbers, so that only the dims of heads can be cut."""

    def run(n, x):
        q = n.q(x).view(x.shape[0], n.heads, -1)
        return n.b((q.relu() * torch.tensor([0.5, 0.25, 0.125])[:, None]).flatten(1))

    graph = sec.trace(Net(run, q=Linear(6, 12), b=Linear(12, 3), heads=3), X)
    line = run.__code__.co_firstlineno + 2
    told = f"a factor of 3 in its 12: a tensor of numbers that the code makes (test_trace_told.py:{line})"
    assert reason(graph, "q.weight", 0) == reason(graph, "b.weight", 1) == told
    assert [axis.size for axis in graph.axes] == [4]


def test_the_places_of_a_flattened_image_are_no_factor_to_tell_of():
    graph = sec.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), Linear(32, 5)), torch.randn(2, 3, 4, 4))
    assert {b.tensor for b in graph.blocked} == {"0.weight", "2.weight", "2.bias"}
    assert not any("factor" in b.reason for b in graph.blocked)


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Linear(6, 8), Linear(8, 3)

    def forward(self, x, skip=None):
        skip = x.new_zeros(len(x), 8) if skip is None else skip
        return self.b(self.a(x) + skip)


def test_an_argument_that_was_left_out_is_named():
    graph = sec.trace(Added(), X)
    assert reason(graph, "a.weight", 0) == "a dimension of the model's input, if it is given skip"


def test_an_argument_that_changes_the_answer_is_named():
    class Scored(Added):
        def forward(self, x, scores=False):
            h = self.a(x)
            return h.softmax(-1) if scores else self.b(h)

    graph = sec.trace(Scored(), X)
    assert reason(graph, "a.weight", 0) == "a dimension of the model's output with scores=True"


def test_what_an_argument_adds_to_the_answer_is_a_hidden_layer():
    class Shown(Added):
        def forward(self, x, hidden=False):
            h = self.a(x)
            return (self.b(h), h) if hidden else self.b(h)

    assert [axis.size for axis in sec.trace(Shown(), X).axes] == [8]


def test_a_variance_keeps_more_than_it_is_corrected_by():
    model = Net(lambda n, x: (n.w * x.mean()).var(0, unbiased=True), w=nn.Parameter(torch.randn(2, 3)))
    assert reason(sec.trace(model, X), "w", 0).startswith("its size must satisfy")
    model = Net(lambda n, x: (n.w * x.mean()).var(0, unbiased=False), w=nn.Parameter(torch.randn(2, 3)))
    assert [axis.size for axis in sec.trace(model, X).axes] == [2]


class Windowed(nn.Module):
    """Two branches take features apart, and nothing that is known leads to them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.plugin = Linear(6, 8), Linear(8, 3), None

    def forward(self, x, given=None):
        h = self.a(x)
        if x.shape[0] == 77:
            h = h[:, :4].repeat(1, 2)
        if x.shape[0] < 77:
            h = h + (h[:, 2:] if x.shape[1] == 78 else h)
        return self.b(h)


def test_a_branch_that_takes_tensors_apart_is_taken_by_force_or_else_told_with_its_line():
    """With the first, the model runs; with the second, its own sizes do not fit."""
    first = Windowed.forward.__code__.co_firstlineno
    graph = sec.trace(Windowed(), X)
    assert [(u.what, u.where) for u in graph.unseen if "code does" in u.what] == [
        ("what the code does if x.shape[1] == 78", f"test_trace_told.py:{first + 5}")
    ]
    assert reason(graph, "a.weight", 0).startswith(f"4 is a literal at test_trace_told.py:{first + 3}")


def test_a_branch_that_some_example_took_is_not_told():
    graph = sec.trace(Windowed(), sec.Examples(X, torch.randn(77, 6)))
    assert [u.what for u in graph.unseen if "code does" in u.what] == ["what the code does if x.shape[1] == 78"]


def test_a_key_of_an_input_that_is_asked_for_is_told():
    class Weighed(Added):
        def forward(self, batch):
            h = self.a(batch["x"])
            return self.b(h * batch["weight"] if "weight" in batch else h)

    graph = sec.trace(Weighed(), ({"x": X},))
    assert [u.what for u in graph.unseen] == ["what forward does when it is given batch['weight']"]


def test_a_method_without_layers_is_not_taken_for_seen_by_being_given_something_else():
    class Halved(Added):
        def forward(self, x):
            return self.b(self.a(x))

        def halved(self, features):
            return features[:, :4]

    graph = sec.trace(Halved(), X)
    assert [u.what for u in graph.unseen] == ["what Halved.halved does, which forward does not call"]


class Step:
    """A step that is no module."""

    def __init__(self):
        self.turns = False

    def __call__(self, h):
        return torch.cat([h[:, 4:], h[:, :4]], 1) if self.turns else h


def test_an_object_that_is_asked_is_tried_otherwise_and_is_as_before():
    step = Step()
    model = Net(lambda n, x: n.b(n.step(n.a(x))), a=Linear(6, 8), b=Linear(8, 3), step=step)
    assert "4 is a literal" in reason(sec.trace(model, X), "a.weight", 0)
    assert not step.turns
    assert model.step is step
