"""Every architecture is traced, cut in half without annotations, and the cut proved right."""

from __future__ import annotations

import time
import warnings
from collections import Counter

import pytest
import torch

import secateur as sec
from oracle import each_axis
from represented import represented
from secateur.axes import Inherent, Layout, atoms, free_atoms
from zoo.architectures import MODELS, build

# A few of every kind, for every run of the tests; the rest by `make zoo`.
REPRESENTATIVE = (
    "timm levit_128s",
    "timm mobilenetv3_small_050",
    "timm test_nfnet",
    "timm test_vit",
    "torchvision shufflenet_v2_x0_5",
    "transformers deberta",
    "transformers gpt2",
    "transformers llama",
    "transformers mamba",
    "transformers mixtral",
    "transformers t5",
    "transformers whisper",
)


def cut_in_half(line: str) -> None:
    model, example = build(line)
    start = time.perf_counter()
    graph = sec.trace(model, example)
    seconds = time.perf_counter() - start
    touched = graph.touched()
    assert not graph.unknown, f"ops without a rule: {dict(graph.unknown)}"
    reasons = Counter(blocked.reason.partition(" (")[0] for blocked in graph.blocked)
    untouched = [
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() > 1
        and not any(free_atoms(layout) for layout in graph.layouts[name])
        and not all(inherent(layout) for layout in graph.layouts[name])
    ]
    assert all(any(b.tensor == name and b.reason for b in graph.blocked) for name in untouched)
    cut_once(graph, sec.plan(graph, sec.Ratio(0.5)))
    plan = sec.plan(graph, each_axis(graph, 0.5))
    before = sum(parameter.numel() for parameter in model.parameters())
    sec.apply(model, plan)  # verified: raises where the cut model is not what it should be
    after = sum(parameter.numel() for parameter in model.parameters())
    assert after < before
    assert after == plan.params.after
    print(
        f"\n{line:<44} {seconds:5.1f} s  {len(graph.axes):4} axes  {touched:6.1%} touched  "
        f"{after / before:6.1%} of the parameters left  blocked: "
        + ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
    )


def inherent(layout: Layout) -> bool:
    """Whether a dimension is one that nobody would cut, and so is not listed as blocked: of a kernel, or of size 1."""
    return all(atom.size == 1 or isinstance(atom.fixed, Inherent) for atom in atoms(layout))


def cut_once(graph: sec.Graph, plan: sec.Plan) -> None:
    """A ratio of a half leaves about half of each dimension, not a quarter, whatever the dimension is made of."""
    for name, dims in plan.kept.items():
        shape = plan.shapes[name]
        if graph.kinds[name] == "parameter" and len(shape) > 1:
            assert all(len(kept) >= shape[dim] / 2 - 1e-9 for dim, kept in dims.items()), name
    assert not any(axis.name.endswith("rotary pairs") for axis in plan.axes)


OTHER_SHARES = {"transformers layoutlm": 0.9}  # its tables, which stay, are more than 0.8 of this small one


def compressed(line: str) -> None:
    """Scores from data, a budget, refitted layers: it runs, and brings the output nearer or leaves it."""
    model, example = build(line)
    share = OTHER_SHARES.get(line, 0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sec.SecateurWarning)  # what is taken back is told in the outcome
        report = sec.compress(model, example, sec.Params(share), [example, example], timed=False)
    outcome = report.compensation
    assert report.params.after <= share * report.params.before
    assert outcome.after <= outcome.before * (1 + 1e-6) + 1e-9
    assert all(not layer.after > layer.before * (1 + 1e-6) for layer in outcome.layers)
    print(
        f"\n{line:<44} {report.seconds:5.1f} s  {len(outcome.layers):4} layers refitted  "
        f"{outcome.before:.2e} → {outcome.after:.2e}  {'taken back' if outcome.taken_back else ''}  "
        + "; ".join(outcome.notes[:2])
    )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("line", REPRESENTATIVE)
def test_representative(line: str) -> None:
    cut_in_half(line)


@pytest.mark.zoo
@pytest.mark.parametrize("line", [line for line in MODELS if line not in REPRESENTATIVE])
def test_every_other(line: str) -> None:
    cut_in_half(line)


def test_the_list_is_whole() -> None:
    assert len(MODELS) == len(set(MODELS)) == 200
    assert set(REPRESENTATIVE) <= set(MODELS)


COMPRESSED = ("timm test_resnet", "timm test_vit", "transformers llama", "transformers mixtral")


@pytest.mark.parametrize("line", represented(COMPRESSED, by=("timm test_resnet", "transformers mixtral")))
def test_compressed_with_data(line: str) -> None:
    compressed(line)


@pytest.mark.zoo
@pytest.mark.parametrize("line", [line for line in MODELS if line not in COMPRESSED])
def test_compressed_with_data_in_the_whole_zoo(line: str) -> None:
    compressed(line)
