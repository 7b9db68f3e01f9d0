"""What a story says is what happened to the model."""

from __future__ import annotations

import math

import pytest
import torch
from stories import resnet, tiny
from torch import nn

import secateur as sec
from secateur.report import Figure, ReportError, Story, Strand, Sweep, Table, scores_of


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 4 * 4, 5)
    )


IMAGE = torch.zeros(1, 3, 8, 8)


def figures(story: Story) -> dict[str, tuple[float | None, ...]]:
    return {figure.name: figure.values for figure in story.figures}


def test_the_figures_are_those_of_the_models_before_and_after() -> None:
    net = network()
    graph = sec.trace(net, IMAGE)
    plan = sec.plan(graph, sec.Ratio(0.5))
    story = Story.of(graph, plan)
    before = (sec.macs(net, IMAGE), sum(p.numel() for p in net.parameters()))
    sec.apply(net, plan)
    after = (sec.macs(net, IMAGE), sum(p.numel() for p in net.parameters()))
    assert figures(story)["MACs"] == (before[0], after[0])
    assert figures(story)["parameters"] == (before[1], after[1])
    assert figures(story)["weights"] == (4 * before[1], 4 * after[1])


def test_layers_are_those_of_the_cut_model_traced_again() -> None:
    net = network()
    graph = sec.trace(net, IMAGE)
    plan = sec.plan(graph, sec.Ratio(0.5))
    story = Story.of(graph, plan)
    small = Story.of(sec.trace(sec.apply(net, plan), IMAGE))
    assert [(layer.module, layer.after) for layer in story.layers] == [(la.module, la.before) for la in small.layers]
    assert sum(layer.before for layer in story.layers) == plan.macs.before
    assert sum(layer.after for layer in story.layers) == plan.macs.after
    assert {shape.tensor: shape.after for shape in story.shapes} == {s.tensor: s.before for s in small.shapes}
    assert {shape.tensor: shape.after for shape in story.shapes if shape.after} == {
        name: tuple(tensor.shape) for name, tensor in net.state_dict().items() if tensor.ndim
    }


def test_a_story_told_after_the_cut_is_the_same() -> None:
    net = network()
    graph = sec.trace(net, IMAGE)
    plan = sec.plan(graph, sec.Ratio(0.5))
    story = Story.of(graph, plan)
    sec.apply(net, plan)
    assert Story.of(graph, plan) == story


def test_every_axis_is_there_with_what_stays_of_it() -> None:
    graph = sec.trace(network(), IMAGE)
    plan = sec.plan(graph, sec.Ratio(0.5), protect=("5",))
    story = Story.of(graph, plan)
    assert [(axis.name, axis.size, axis.sites) for axis in story.axes] == [
        (a.name, a.size, a.sites) for a in graph.axes
    ]
    cut = {axis.name: axis for axis in plan.axes}
    assert 0 < len(cut) < len(story.axes)
    for axis in story.axes:
        if axis.name in cut:
            planned = cut[axis.name]
            assert (axis.keep, axis.macs, axis.params) == (planned.keep, planned.macs, planned.params)
        else:
            assert axis.removed == axis.macs == axis.params == 0


def test_what_stays_has_the_highest_scores() -> None:
    graph = sec.trace(network(), IMAGE)
    story = Story.of(graph, sec.plan(graph, sec.Ratio(0.5)), scores=scores_of(graph, sec.Magnitude()))
    for axis in story.axes:
        assert axis.scores is not None
        kept = [axis.scores[i] for i in axis.keep]
        assert min(kept) >= max(set(axis.scores) - set(kept))


def test_stages_after_the_cut_have_its_cost() -> None:
    story = tiny(stages=("before", "cut", "recovered"), figures=[Figure("accuracy", (0.9, 0.5, 0.8), "%")])
    assert figures(story) == {
        "MACs": (48, 24, 24),
        "parameters": (58, 30, 30),
        "weights": (232, 120, 120),
        "accuracy": (0.9, 0.5, 0.8),
    }


def test_a_measured_figure_replaces_the_computed_one() -> None:
    story = tiny(figures=[Figure("weights", (1000, 600), "B")])
    assert figures(story)["weights"] == (1000, 600)
    assert [figure.name for figure in story.figures] == ["MACs", "parameters", "weights"]


def test_without_a_plan_nothing_is_cut() -> None:
    graph = sec.trace(network(), IMAGE)
    story = Story.of(graph)
    assert not story.cut
    assert story.stages == ("before",)
    assert all(layer.before == layer.after for layer in story.layers)
    assert resnet().cut


def test_the_name_is_that_of_the_class_unless_given() -> None:
    assert (tiny().model, tiny(model="mine").model) == ("Sequential", "mine")


def test_a_story_keeps_nothing_of_the_model() -> None:
    """So it can be sent to another process, and the model can be freed."""
    import pickle

    assert pickle.loads(pickle.dumps(resnet())) == resnet()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tiny(figures=[Figure("accuracy", (0.9,), "%")]), "accuracy has 1 values for 2 stages"),
        (lambda: tiny(scores={"no such axis": (1.0,)}), "'no such axis', which is no axis"),
        (lambda: tiny(scores={"0 features": (1.0,)}), "8 positions but 1 scores"),
        (lambda: tiny(scores={"0 features": (math.nan,) * 8}), "NaN"),
        (lambda: tiny(scores={"0 features": (-math.inf,) * 8}), "minus infinity"),
        (lambda: Strand("a", 4, (2, 1), ()), "rising"),
        (lambda: Strand("a", 4, (4,), ()), "below 4"),
        (lambda: Table("t", ("a", "b"), (("1",),)), "2 columns"),
        (lambda: Sweep("accuracy", curve=((1.0, math.nan),)), "not a finite number"),
        (lambda: Sweep("accuracy", sensitivity=(("a", math.inf),)), "not a finite number"),
    ],
    ids=["stages", "axis", "count", "nan", "minus-inf", "order", "range", "table", "curve", "sensitivity"],
)
def test_what_contradicts_itself_is_refused(make: object, said: str) -> None:
    with pytest.raises(ReportError, match=said):
        make()  # type: ignore[operator]


def test_a_plan_of_another_model_is_refused() -> None:
    def graph(width: int) -> sec.Graph:
        net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        return sec.trace(net, torch.zeros(1, 4))

    with pytest.raises(ReportError, match="0 features with 8 positions; in the graph there it has 6"):
        Story.of(graph(6), sec.plan(graph(8), sec.Ratio(0.5)))
    with pytest.raises(ReportError, match="in the graph there is none"):
        Story.of(sec.trace(nn.Linear(4, 2), torch.zeros(1, 4)), sec.plan(graph(8), sec.Ratio(0.5)))


def test_scores_of_a_model_that_is_cut_already_are_refused() -> None:
    net = network()
    graph = sec.trace(net, IMAGE)
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    with pytest.raises(ReportError, match="call scores_of before apply"):
        scores_of(graph, sec.Magnitude())
