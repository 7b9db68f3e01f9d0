"""Blocks, numbers, markup, colours: what a page is made of."""

from __future__ import annotations

import base64
import html.parser
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup
from stories import densenet, resnet

from secateur.report.formatting import amount, change, digits
from secateur.report.html import dotted, templates
from secateur.report.palette import PALETTE, colours
from secateur.report.payload import payload, quantised, ties
from secateur.report.sections import profile, sections
from secateur.report.story import LayerCost

TEXT = st.text("<>&\"'/;=#! abglmpt.é")  # what markup is made of
NAMES = st.lists(st.sampled_from("ab012"), min_size=1, max_size=5).map(".".join)


@given(st.lists(NAMES, unique=True, max_size=40), st.integers(1, 12))
def test_every_module_is_in_one_section(modules: list[str], limit: int) -> None:
    found = sections(modules, limit)
    assert sorted(m for section in found for m in section.modules) == sorted(modules)
    assert all(len(section.modules) <= limit for section in found)


def test_sections_of_a_real_model() -> None:
    modules = list(dict.fromkeys(shape.module for shape in resnet().shapes))
    assert [section.title for section in sections(modules)] == [
        "conv1 … bn1",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
        "fc",
    ]
    dense = list(dict.fromkeys(shape.module for shape in densenet().shapes))
    assert "features.denseblock3.denselayer48" in [section.title for section in sections(dense)]


@given(st.lists(NAMES, unique=True, max_size=60), st.integers(1, 10))
def test_a_profile_keeps_the_sum(modules: list[str], most: int) -> None:
    layers = [LayerCost(module, 2**i, i) for i, module in enumerate(modules)]
    if len({module.partition(".")[0] for module in modules}) > most:
        return
    found = profile(layers, most)
    assert len(found) <= most
    assert sum(layer.before for layer in found) == sum(layer.before for layer in layers)
    assert sum(layer.after for layer in found) == sum(layer.after for layer in layers)


def test_a_profile_of_few_layers_is_the_layers() -> None:
    assert profile(resnet().layers) == resnet().layers


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (1000, "", "1.00 k"),
        (0.5, "", "0.500"),
        (25_557_032, "", "25.6 M"),
        (512, "B", "512 B"),
        (0.0, "s", "0 s"),
        (3.2e-5, "s", "32.0 µs"),
        (2e-12, "s", "0.00200 ns"),
        (75, "s", "75.0 s"),
        (1.0, "%", "100.0 %"),
        (31.25, "ppl", "31.2 ppl"),
    ],
)
def test_amounts(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


@given(st.floats(1e-3, 1e6))
def test_digits_are_near_the_number(value: float) -> None:
    assert math.isclose(float(digits(value).replace(",", "")), value, rel_tol=0.006)


def test_changes() -> None:
    assert change(0, 5) == ""
    assert change(2, 3) == "+50.0 %"
    assert change(0.5, None, "%") == ""


class _Text(html.parser.HTMLParser):
    """The text and the tags of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def rendered(template: str, **values: object) -> str:
    """A template of our own, with everything that the page's has."""
    return templates().from_string(template).render(**values)


@given(TEXT, TEXT)
def test_text_comes_out_as_it_went_in(child: str, attribute: str) -> None:
    seen = _Text(rendered('<p title="{{ title }}">{{ child }}</p>', child=child, title=attribute))
    assert seen.text == child
    assert seen.tags == [("p", {"title": attribute})]
    assert _Text(str(dotted(child))).text == child


@given(st.text())
def test_data_can_stand_in_a_script(text: str) -> None:
    inside = rendered("{{ value|tojson }}", value={"name": text})
    assert not set("<>&") & set(inside)
    assert json.loads(inside) == {"name": text}


def test_markup_is_not_escaped_twice() -> None:
    assert rendered("{{ a }}{{ b }}<b>{{ c }}</b>", a="<", b=Markup("<i>"), c="&") == "&lt;<i><b>&amp;</b>"
    table = "{% from 'parts.html' import table %}{{ table(('a', 'b'), rows, numeric=numeric) }}"
    assert "<table>" in rendered(table, rows=(), numeric=False)
    assert '<table class="numbers">' in rendered(table, rows=(), numeric=True)
    assert "<td>&lt;</td>" in rendered(table, rows=[("x", "<")], numeric=False)


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        rendered("{{ value|tojson }}", value=math.nan)


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="sumary"):
        rendered("{{ sumary }}", summary="")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.booleans())
def test_scores_survive_their_16_bits(scores: list[float], endless: bool) -> None:
    coded = quantised((*scores, *([math.inf] if endless else [])))
    codes = np.frombuffer(base64.b64decode(coded["codes"]), "<u2").astype(float)
    span = coded["high"] - coded["low"]
    values = coded["low"] + codes[: len(scores)] / 65534 * span
    assert np.allclose(values, scores, atol=span / 65534 + 1e-9, rtol=1e-9)
    assert list(codes[len(scores) :]) == [65535] * endless
    assert 65535 not in codes[: len(scores)]


def test_the_payload_has_every_position_and_every_site() -> None:
    story = resnet()
    made = payload(story)
    for axis, strand in zip(story.axes, made["axes"], strict=True):
        bits = np.unpackbits(np.frombuffer(base64.b64decode(strand["mask"]), np.uint8), bitorder="little")
        assert tuple(np.flatnonzero(bits[: axis.size])) == axis.keep
        assert {made["modules"][i] for i in strand["modules"]} == {s.tensor.rpartition(".")[0] for s in axis.sites}
    sets, of_site = ties(story)
    for (tensor, dim), number in of_site.items():
        here = {i for i, axis in enumerate(story.axes) if any((s.tensor, s.dim) == (tensor, dim) for s in axis.sites)}
        assert set(sets[number]) == here


def _contrast(one: str, two: str) -> float:
    """WCAG 2's ratio of two colours."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((light(one), light(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_the_contrast_that_reading_needs(dark: bool) -> None:
    tones = colours(dark=dark)
    for ground in ("paper", "card"):
        for text in ("ink", "soft", "gone-ink"):
            assert _contrast(tones[text], tones[ground]) >= 4.5, (text, ground)
        for shape in ("kept", "gone"):
            assert _contrast(tones[shape], tones[ground]) >= 3, (shape, ground)
    assert _contrast(tones["ink"], tones["glow"]) >= 4.5
    assert _contrast(tones["gone-ink"], tones["glow"]) >= 4.5
    assert _contrast("#000000" if not dark else "#14171b", tones["gone"]) >= 4.5  # a lit dimension
    assert set(tones) == set(PALETTE)
