"""Stories that several tests read."""

from __future__ import annotations

import functools

import torch
from torch import nn

import secateur as sec
from secateur.report import Figure, Story, Sweep, Table, scores_of

# Everything that a browser or Plotly could take for markup, in places where a model's author chooses the name.
HOSTILE = "<script>hacked=1</script><img src=x onerror=hacked=1>&amp;\"'</title></script><b>x</b>"


class Named(nn.Module):
    """Two layers in a module of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = name
        self.add_module(name, nn.Linear(4, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(getattr(self, self.first)(x)))


def tiny(**more: object) -> Story:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = sec.trace(net, torch.zeros(1, 4))
    return Story.of(graph, sec.plan(graph, sec.Ratio(0.5)), **more)  # type: ignore[arg-type]


@functools.cache
def hostile() -> Story:
    graph = sec.trace(Named(HOSTILE), torch.zeros(1, 4))
    plan = sec.plan(graph, sec.Ratio(0.5))
    axis = graph.axes[0].name
    return Story.of(
        graph,
        plan,
        model=HOSTILE,
        scores=scores_of(graph, sec.Magnitude()),
        stages=("before", HOSTILE, "after"),
        figures=[Figure(HOSTILE, (1.0, 2.0, 3.0), HOSTILE)],
        sweep=Sweep(HOSTILE, ((1.0, 0.9), (0.5, 0.8)), ((axis, 0.7),), 0.9, HOSTILE),
        tables=[Table(HOSTILE, (HOSTILE, "b"), ((HOSTILE, HOSTILE),))],
        notes=[HOSTILE],
    )


@functools.cache
def resnet() -> Story:
    """A story with everything in it. The accuracies are made up: nothing is asked of them."""
    import torchvision

    torch.manual_seed(0)
    graph = sec.trace(torchvision.models.resnet18(), torch.zeros(1, 3, 224, 224))
    names = [axis.name for axis in graph.axes]
    return Story.of(
        graph,
        sec.plan(graph, sec.Macs(0.5)),
        model="resnet18",
        scores=scores_of(graph, sec.Magnitude()),
        stages=("before", "cut", "recovered"),
        figures=[Figure("accuracy", (0.93, 0.71, 0.92), "%"), Figure("latency", (0.032, 0.018, None), "s")],
        sweep=Sweep("accuracy", ((1.0, 0.93), (0.5, 0.9), (0.3, 0.8)), tuple((n, 0.9) for n in names), 0.93),
        tables=[Table("Compensation", ("layer", "error"), (("layer1.0.conv2", "0.04"),))],
        notes=["Measured nowhere."],
    )


@functools.cache
def densenet() -> Story:
    """200 axes with ten thousand sites."""
    import torchvision

    net = torchvision.models.DenseNet(growth_rate=8, block_config=(6, 12, 48, 32), num_init_features=16)
    graph = sec.trace(net, torch.zeros(1, 3, 64, 64), variants=False)
    scores = scores_of(graph, sec.Magnitude())
    return Story.of(graph, sec.plan(graph, sec.Ratio(0.3)), model="densenet201", scores=scores)


@functools.cache
def llama() -> Story:
    """A language model whose axes are wide: 32 blocks with 1,376 hidden units each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=1376,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    graph = sec.trace(LlamaForCausalLM(config), {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False})
    scores = scores_of(graph, sec.Magnitude())
    return Story.of(graph, sec.plan(graph, sec.Ratio(0.3)), model="llama", scores=scores)
