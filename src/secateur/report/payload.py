"""What the page's charts are drawn from: the story as compact JSON."""

import base64
from typing import Any

import numpy as np

from secateur.report.sections import profile
from secateur.report.story import LayerCost, Story, Strand

_INFINITE = 65535  # the code of an infinite score


def payload(story: Story) -> dict[str, Any]:
    """Everything that the script of the page reads.

    >>> story = Story("tiny", ("before",), (), axes=(Strand("a", 2, (0,), ()),))
    >>> payload(story)["axes"][0]["name"]
    'a'
    """
    modules = ties_modules(story)
    number = {module: i for i, module in enumerate(modules)}
    grouped = profile(story.layers)
    return {
        "cut": story.cut,
        "layers": _rows(story.layers),
        "blocks": _rows(grouped) if len(grouped) < len(story.layers) else None,
        "modules": modules,
        "axes": [_strand(axis, number) for axis in story.axes],
        "ties": [list(axes) for axes in ties(story)[0]],
        "sweep": None
        if story.sweep is None
        else {
            "metric": story.sweep.metric,
            "cost": story.sweep.cost,
            "whole": story.sweep.whole,
            "curve": sorted(story.sweep.curve),
            "sensitivity": list(story.sweep.sensitivity),
        },
    }


def _rows(layers: tuple[LayerCost, ...]) -> list[list[str | int]]:
    return [[layer.module or "(top level)", layer.before, layer.after] for layer in layers]


def ties_modules(story: Story) -> list[str]:
    """The modules that any axis runs through, in the model's order."""
    tied = {site.tensor for axis in story.axes for site in axis.sites}
    return list(dict.fromkeys(shape.module for shape in story.shapes if shape.tensor in tied))


def ties(story: Story) -> tuple[list[tuple[int, ...]], dict[tuple[str, int], int]]:
    """Each set of axes that shares a dimension, once; and for every tied dimension which set it is."""
    axes_at: dict[tuple[str, int], list[int]] = {}
    for i, axis in enumerate(story.axes):
        for site in axis.sites:
            axes_at.setdefault((site.tensor, site.dim), []).append(i)
    numbers: dict[tuple[int, ...], int] = {}
    of_site = {site: numbers.setdefault(tuple(axes), len(numbers)) for site, axes in axes_at.items()}
    return list(numbers), of_site


def _strand(axis: Strand, number: dict[str, int]) -> dict[str, Any]:
    mask = np.zeros(axis.size, np.bool_)
    mask[list(axis.keep)] = True
    return {
        "name": axis.name,
        "size": axis.size,
        "kept": len(axis.keep),
        "exact": axis.exact,
        "why": axis.why,
        "macs": axis.macs,
        "params": axis.params,
        "sites": len(axis.sites),
        "mask": _base64(np.packbits(mask, bitorder="little")),
        "scores": None if axis.scores is None else quantised(axis.scores),
        "modules": sorted({number[m] for s in axis.sites if (m := s.tensor.rpartition(".")[0]) in number}),
    }


def quantised(scores: tuple[float, ...]) -> dict[str, Any]:
    """Scores in 16 bits each, between the lowest and the highest; infinite ones have a code of their own.

    >>> quantised((0.0, 1.0, float("inf")))
    {'low': 0.0, 'high': 1.0, 'codes': 'AAD+////'}
    """
    values = np.array(scores, np.float64)
    finite = np.isfinite(values)
    low, high = (float(values[finite].min()), float(values[finite].max())) if finite.any() else (0.0, 0.0)
    span = high - low or 1.0
    codes = np.full(len(values), _INFINITE, "<u2")
    codes[finite] = np.rint((values[finite] - low) / span * (_INFINITE - 1)).astype("<u2")
    return {"low": low, "high": high, "codes": _base64(codes)}


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
