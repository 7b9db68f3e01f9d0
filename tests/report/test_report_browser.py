"""The report in a real browser: it renders, reacts, stays within the screen, and asks nothing of anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import chromium
import pytest
import torch
from chromium import Browser, browser
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from stories import HOSTILE, densenet, hostile, resnet, tiny
from torch import nn

import secateur as sec
from represented import represented
from secateur.planning.plans import make_plan
from secateur.report import Story, write_html
from secateur.report.palette import colours

CHARTS = ("layers", "curve", "sensitivity", "axis", "ties")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "resnet.html"
    write_html(resnet(), path)
    return path


def show(chrome: Browser, chart: str) -> None:
    """Bring a chart into view and wait for it."""
    chrome.run(f"document.getElementById('chart-{chart}').scrollIntoView({{block: 'center'}})")
    chrome.wait(f"return document.querySelector('#chart-{chart} .main-svg') !== null")


def lit(chrome: Browser) -> set[str]:
    """Every site that is highlighted, as the page names it."""
    labels = chrome.run("return [...document.querySelectorAll('#map .tied.lit')].map((e) => e.ariaLabel)")
    return {site for label in labels for site in label.partition(": ")[2].split(", ")}


def sites(story: Story, *axes: int) -> set[str]:
    return {str(site) for axis in axes for site in story.axes[axis].sites}


def chosen(chrome: Browser) -> int:
    return chrome.run("return +document.querySelector('#axes-list [aria-selected=true]').dataset.axis")


def rgb(tone: str, *, dark: bool) -> str:
    colour = colours(dark=dark)[tone]
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


def counted(chrome: Browser, css: str) -> int:
    return chrome.run("return document.querySelectorAll(arguments[0]).length", css)


def test_every_chart_is_drawn_from_the_story(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    for chart in CHARTS:
        show(chrome, chart)
    story = resnet()
    assert story.sweep is not None
    assert counted(chrome, "#chart-layers .bars .point") == 2 * len(story.layers)
    assert counted(chrome, "#chart-curve .scatterlayer .point") == len(story.sweep.curve)
    assert counted(chrome, "#chart-sensitivity .bars .point") == len(story.sweep.sensitivity)
    assert counted(chrome, "#chart-axis .scatterlayer .trace") == 2
    cells = chrome.run("return document.getElementById('chart-ties').data[0].z.flat().filter((z) => z !== null).length")
    assert cells == sum(len({site.tensor.rpartition(".")[0] for site in axis.sites}) for axis in story.axes)
    first = chrome.run("const c = document.getElementById('chart-layers').data; return [c[0].x[0], c[1].x[0]]")
    assert first == [story.layers[0].before, story.layers[0].after]


def test_no_word_on_the_console_and_no_request(chrome: Browser, page: Path) -> None:
    chrome.open(page, dark=True)
    for chart in CHARTS:
        show(chrome, chart)
    chrome.one("#theme").click()
    chrome.one("#axes-list li:nth-child(3)").click()
    chrome.one("#axis-order button:nth-child(2)").click()
    assert chrome.logged() == []
    urls = chrome.requested()
    assert urls[0] == page.as_uri()
    assert [url for url in urls[1:] if not url.startswith("data:")] == []


def test_an_error_would_be_seen(chrome: Browser, tmp_path: Path) -> None:
    """The two tests above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>nobody()</script><img src='https://example.invalid/x.png'>")
    chrome.open(bad)
    chrome.wait("return document.readyState === 'complete'")
    assert any("nobody is not defined" in line for line in chrome.logged())
    assert "https://example.invalid/x.png" in chrome.requested()


def test_pointing_at_an_axis_shows_all_its_sites(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    at_rest = chosen(chrome)
    assert lit(chrome) == sites(resnet(), at_rest)
    for axis in (1, 4):
        ActionChains(chrome.driver).move_to_element(chrome.one(f"#axis-{axis} .name")).perform()
        assert lit(chrome) == sites(resnet(), axis)
        assert chosen(chrome) == at_rest
    ActionChains(chrome.driver).move_to_element(chrome.one("#axis-facts")).perform()
    assert lit(chrome) == sites(resnet(), at_rest)


def test_the_keyboard_does_what_the_mouse_does(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    chrome.one("#filter").send_keys(Keys.TAB)
    start = chosen(chrome)
    ActionChains(chrome.driver).send_keys(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_DOWN).perform()
    assert chosen(chrome) == 2
    assert start != 2
    assert lit(chrome) == sites(resnet(), 2)
    assert chrome.one("#axis-name").text == resnet().axes[2].name
    assert chrome.run("return document.activeElement.id") == "axis-2"
    assert counted(chrome, "#axes-list [tabindex='0']") == counted(chrome, "#map [tabindex='0']") == 1


def test_a_dimension_of_the_map_shows_what_it_is_tied_to(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    story = resnet()
    axis = next(i for i, strand in enumerate(story.axes) if strand.name == "layer3.1.conv1 channels")
    last = chrome.one("#map .tied[aria-label*='layer3.1.conv2.weight[1]']")
    chrome.run("arguments[0].scrollIntoView({block: 'center'})", last)
    ActionChains(chrome.driver).move_to_element(last).perform()
    assert lit(chrome) == sites(story, axis)
    last.click()
    assert chosen(chrome) == axis
    before = chrome.run("return document.activeElement.ariaLabel")
    ActionChains(chrome.driver).send_keys(Keys.ARROW_LEFT).perform()
    assert chrome.run("return document.activeElement.ariaLabel") != before
    other = next(i for i, strand in enumerate(story.axes) if strand.name == "layer3.0.conv2 channels")
    assert lit(chrome) == sites(story, other)  # the output of the same layer


def test_a_cell_of_the_matrix_can_be_pressed(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    show(chrome, "ties")
    at = chrome.run(
        """const chart = document.getElementById('chart-ties');
        const box = chart.querySelector('.nsewdrag').getBoundingClientRect();
        const z = chart.data[0].z, row = 7, column = z[row].findIndex((value) => value !== null);
        return [box.left + (column + 0.5) / z[row].length * box.width, box.top + (row + 0.5) / z.length * box.height]"""
    )
    pointer = ActionChains(chrome.driver)
    pointer.w3c_actions.pointer_action.move_to_location(*map(round, at))
    pointer.perform()
    chrome.wait("return document.querySelector('#chart-ties .hoverlayer .hovertext') !== null")
    assert resnet().axes[7].name in chrome.run("return document.querySelector('#chart-ties .hoverlayer').textContent")
    pointer.click().perform()
    chrome.wait("return document.querySelector('#axis-7[aria-selected=true]') !== null")


def test_the_chosen_axis_is_told_in_full(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    chrome.one("#axis-1").click()
    show(chrome, "axis")
    strand = resnet().axes[1]
    facts = chrome.one("#axis-facts").text
    assert f"{len(strand.keep)} of {strand.size} positions kept, {len(strand.sites)} sites" in facts
    assert f"{strand.macs:,} MACs" in facts
    assert strand.scores is not None
    drawn = "const c = document.getElementById('chart-axis').data; return c.map((t) => [t.name, t.x, t.y])"
    heights = {}
    for name, x, y in chrome.run(drawn):
        for at, height in zip(x[1::3], y[1::3], strict=True):
            heights[at] = (name, height)
    for i, score in enumerate(strand.scores):
        assert heights[i] == ("kept" if i in strand.keep else "removed", pytest.approx(score, abs=1e-3))
    chrome.one("#axis-order button:nth-child(2)").click()
    first = [height for name, _, y in chrome.run(drawn) for height in y[1::3] if name == "kept"]
    assert first == sorted(first, reverse=True)
    removed = chrome.run("return document.getElementById('axis-removed').textContent")
    gone: list[int] = []
    for span in removed.split(", "):
        low, _, high = span.partition("–")
        gone += range(int(low), int(high or low) + 1)
    assert gone == sorted(set(range(strand.size)) - set(strand.keep))


def test_the_filter(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    chrome.one("#filter").send_keys("LAYER3")
    shown = chrome.run(
        "return [...document.querySelectorAll('#axes-list li')].filter((r) => !r.hidden).map((r) => r.id)"
    )
    assert shown == [f"axis-{i}" for i, axis in enumerate(resnet().axes) if "layer3" in axis.name]
    assert chrome.run("return document.querySelector(\"#axes-list [tabindex='0']\").hidden") is False


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_is_the_readers_until_they_choose(chrome: Browser, page: Path, dark: bool) -> None:
    chrome.open(page, dark=dark)
    ground = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.querySelector('#chart-layers .bars path').style.fill"
    show(chrome, "layers")
    for now in (dark, not dark, dark):
        assert chrome.run(ground) == rgb("paper", dark=now)
        assert chrome.run(ink) == rgb("before", dark=now)
        assert chrome.one("#theme").get_attribute("aria-pressed") == str(now).lower()
        chrome.run("document.getElementById('theme').click()")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("make", represented((resnet, hostile), by=(hostile,)), ids=["resnet", "hostile"])
def test_the_page_fits_its_screen_and_can_be_read(chrome: Browser, tmp_path: Path, width: int, make: object) -> None:
    path = tmp_path / "report.html"
    write_html(make(), path)  # type: ignore[operator]
    chrome.open(path, width=width)
    for chart in CHARTS:
        show(chrome, chart)
    chrome.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert chrome.run(
        "return [innerWidth, document.documentElement.scrollWidth - document.documentElement.clientWidth]"
    ) == [
        width,
        0,
    ]
    beyond = chrome.run(
        """const out = [];
        for (const e of document.querySelectorAll('main *, header *')) {
          const box = e.getBoundingClientRect();
          const outside = box.width && (box.right > innerWidth + 1 || box.left < -1);
          if (outside && !e.closest('.scroll, svg')) out.push(e.outerHTML.slice(0, 90));
        }
        return out"""
    )
    assert beyond == []
    small = chrome.run(
        """const found = new Set();
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
          const e = walk.currentNode.parentElement;
          if (!walk.currentNode.data.trim() || e.closest('script, style') || !e.getClientRects().length) continue;
          if (parseFloat(getComputedStyle(e).fontSize) < 12) found.add(e.outerHTML.slice(0, 90));
        }
        return [...found]"""
    )
    assert small == []


def test_names_are_text_and_nothing_else(chrome: Browser, tmp_path: Path) -> None:
    write_html(hostile(), tmp_path / "report.html")
    chrome.open(tmp_path / "report.html")
    for chart in CHARTS:
        show(chrome, chart)
    assert chrome.run("return typeof window.hacked") == "undefined"
    assert counted(chrome, "main img, header img") == 0
    assert chrome.one("h1").text == HOSTILE
    assert chrome.driver.title == f"{HOSTILE} – Secateur"
    assert chrome.run("return document.querySelector('.name').textContent") == hostile().axes[0].name
    tick = chrome.run(
        "return document.querySelector('#chart-ties .yaxislayer-above text, #chart-ties .ytick text').textContent"
    )
    assert tick.removeprefix("…") in hostile().axes[0].name
    assert chrome.logged() == []


def test_scores_without_limit_and_axes_without_scores(chrome: Browser, tmp_path: Path) -> None:
    write_html(tiny(scores={"0 features": (1.0, 2.0, float("inf"), *range(5))}), tmp_path / "a.html")
    chrome.open(tmp_path / "a.html")
    show(chrome, "axis")
    texts = chrome.run("return document.getElementById('chart-axis').data.flatMap((t) => t.text).filter((t) => t)")
    assert [text for text in texts if "∞" in text] == [next(text for text in texts if text.startswith("position 2,"))]
    write_html(tiny(), tmp_path / "b.html")
    chrome.open(tmp_path / "b.html")
    show(chrome, "axis")
    assert not chrome.one("#axis-order").is_displayed()
    assert chrome.logged() == []


def test_a_large_model_stays_quick(chrome: Browser, tmp_path: Path) -> None:
    """200 axes, ten thousand sites. Limits are many times what an idle machine needs."""
    story = densenet()
    write_html(story, tmp_path / "report.html")
    chrome.open(tmp_path / "report.html")
    chrome.wait("return document.querySelector('#axes-list [aria-selected=true]') !== null")
    many = max(range(len(story.axes)), key=lambda i: len(story.axes[i].sites))
    assert len(story.axes[many].sites) > 150
    hover = chrome.run(
        """const rows = [...document.querySelectorAll('#axes-list li')].slice(0, 50), spent = [];
        for (const row of rows) {
          const start = performance.now();
          row.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
          document.body.offsetHeight;
          spent.push(performance.now() - start);
        }
        return spent.sort((a, b) => a - b)[25]"""
    )
    assert hover < 100
    chrome.run(f"document.getElementById('axis-{many}').click()")
    assert lit(chrome) == sites(story, many)
    show(chrome, "ties")
    chrome.one("#layers-level button:nth-child(2)").click()
    show(chrome, "layers")
    chrome.wait(f"return document.querySelectorAll('#chart-layers .bars .point').length === {2 * len(story.layers)}")
    assert chrome.logged() == []


def wide(size: int = 5_000) -> Story:
    """One axis with thousands of positions, every third of which goes."""
    net = nn.Sequential(nn.Linear(4, size), nn.ReLU(), nn.Linear(size, 2))
    graph = sec.trace(net, torch.zeros(1, 4))
    kept = torch.tensor([i for i in range(size) if i % 3])
    scores = {"0 features": tuple(float(i % 100) for i in range(size))}
    return Story.of(graph, make_plan(graph, {graph.axes[0]: kept}), scores=scores)


@pytest.mark.parametrize("width", represented((390, 1280), by=(390,)))
def test_thousands_of_positions_are_drawn_in_bins(chrome: Browser, tmp_path: Path, width: int) -> None:
    write_html(wide(), tmp_path / "report.html")
    chrome.open(tmp_path / "report.html", width=width)
    show(chrome, "axis")
    room = chrome.run("return document.getElementById('chart-axis').clientWidth")
    drawn = "const c = document.getElementById('chart-axis').data; return c.map((t) => [t.name, t.x, t.y, t.text])"
    kept, removed = chrome.run(drawn)
    bins = len(kept[1]) // 3
    assert room / 8 < bins <= room / 3  # bars that can be told apart
    assert len(removed[1]) == len(kept[1])
    assert removed[2][0::3] == kept[2][1::3]  # one on top of the other
    each = int(chrome.one("#chart-axis .xtitle").text.removeprefix("position, ").removesuffix(" in each bar"))
    assert kept[3][1].startswith(f"positions 0–{each - 1}: ")
    shares = [top / whole for top, whole in zip(kept[2][1::3], removed[2][1::3], strict=True)]
    assert all(abs(share - 2 / 3) < 1 / each for share in shares[:-1])
    means = sum(whole * each for whole in removed[2][1::3][:-1]) / (each * (bins - 1))
    assert means == pytest.approx(49.5, abs=1.5)
    chrome.one("#axis-order button:nth-child(2)").click()
    ranked = [whole for _, _, y, _ in chrome.run(drawn)[1:] for whole in y[1::3]]
    assert ranked == sorted(ranked, reverse=True)
    assert chrome.logged() == []


@pytest.mark.parametrize("make", [resnet, densenet], ids=["resnet", "densenet"])
def test_rows_have_their_labels_on_a_phone(chrome: Browser, tmp_path: Path, make: Callable[[], Story]) -> None:
    write_html(make(), tmp_path / "report.html")
    chrome.open(tmp_path / "report.html", width=390)
    show(chrome, "ties")
    boxes = chrome.run(
        """return [...document.querySelectorAll('#chart-ties .yaxislayer-above text')].map((tick) => {
          const box = tick.getBoundingClientRect();
          return [tick.textContent, box.left, box.right, box.top];
        })"""
    )
    names = [axis.name for axis in make().axes]
    assert min(len(names), 20) <= len(boxes) <= 40
    assert all(left >= 0 and right < 390 / 2 for _, left, right, _ in boxes)
    assert all(any(name.endswith(text.removeprefix("…")) for name in names) for text, *_ in boxes)
    tops = sorted(top for *_, top in boxes)
    assert min(b - a for a, b in pairwise(tops)) > 11


def test_without_a_browser_tests_are_skipped_but_not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "_programs", lambda: None)
    monkeypatch.setattr(chromium.os, "geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"Chromium, which is not here\. As root: apt-get"):
        chromium.installed()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"Chromium, which is not here\. As root: apt-get"):
        chromium.installed()


def test_what_an_installation_says_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert chromium.install("echo waiting for the lock; exit 3").startswith("waiting for the lock\nended with 3")
    assert chromium.install("echo begun; sleep 60", seconds=0.5).startswith("begun\nended with -9")
