"""The files: whole or not at all, the same for the same story, nothing fetched from elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stories import HOSTILE, densenet, hostile, llama, resnet, tiny

import secateur as sec
from represented import represented
from secateur.report import MissingPackageError, Story, write_html, write_png
from secateur.report.html import document
from secateur.tracing import Unseen

WRITERS = [write_html, write_png]


@pytest.mark.parametrize("write", WRITERS)
def test_the_same_story_gives_the_same_bytes(write: Callable[..., None], tmp_path: Path) -> None:
    write(resnet(), tmp_path / "a")
    write(resnet(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("write", WRITERS)
def test_a_failure_leaves_the_old_file(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(sec.FileError, match="No space left"):
        write(tiny(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_that_is_not_there_is_named(write: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(sec.FileError, match="no folder"):
        write(tiny(), tmp_path / "nowhere" / "report")


@pytest.mark.parametrize(("write", "package"), [(write_html, "plotly"), (write_png, "matplotlib")])
def test_a_missing_package_is_named(
    write: Callable[..., None], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}: pip install 'secateur\[report\]'"):
        write(tiny(), tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_the_report_of_a_resnet_takes_less_than_two_seconds(tmp_path: Path) -> None:
    story = resnet()
    document(tiny())  # plotly is read once
    start = time.process_time()
    write_html(story, tmp_path / "report.html")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("make", represented((densenet, llama), by=(densenet,)))
def test_large_models_make_files_of_a_sensible_size(make: Callable[[], Story]) -> None:
    bare = len(document(Story("nothing", ("before",), ())).encode())
    assert len(document(make()).encode()) - bare < 1_000_000


def _own(page: str) -> str:
    """The page without the script of plotly."""
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = _own(document(resnet()))
    assert re.findall(r"https?://\S*", page) == []
    assert re.findall(r"(?:src|href)=\"(?!data:)[^\"]*\"|@import|url\(", page) == []


def test_no_name_becomes_markup() -> None:
    page = _own(document(hostile()))
    assert page.count("<script") == page.count("</script") == 4
    assert "<img" not in page
    assert page.count("<title>") == page.count("</title>") == 1
    assert HOSTILE not in page


def test_all_that_a_story_has_is_in_the_page() -> None:
    page = _own(document(resnet()))
    for text in ("1.81 G", "46.8 MB", "−1.0 points", "32.0 ms", "Compensation", "Measured nowhere.", "recovered"):
        assert text in page, text
    for anchor in ("stages", "layers", "sweep", "axes", "blocked", "notes"):
        assert f'id="{anchor}"' in page
    assert "<b>2</b><span>a dimension of the model&#39;s output</span>" in page
    assert "kernel" not in page  # nobody would cut one
    assert page.count('role="option"') == len(resnet().axes)


def test_what_no_run_showed_is_in_the_page() -> None:
    story = Story("net", ("before",), (), unseen=(Unseen("training mode: ValueError: <b>", "net.py:12"),))
    page = _own(document(story))
    assert 'id="unseen"' in page
    assert "training mode: ValueError: &lt;b&gt; (net.py:12)" in page


def test_sections_without_content_are_left_out() -> None:
    page = _own(document(Story("nothing", ("before",), ())))
    assert "<h2" not in page


def test_a_name_that_is_no_unicode_does_not_stop_the_report(tmp_path: Path) -> None:
    write_html(tiny(model="odd \ud800 name"), tmp_path / "report.html")
    assert "odd ? name" in (tmp_path / "report.html").read_text(encoding="utf-8")


def _pixels(path: Path) -> tuple[int, int, set[tuple[int, ...]]]:
    from matplotlib.image import imread

    image = (imread(path)[..., :3] * 255).round().astype(int)
    return image.shape[1], image.shape[0], set(map(tuple, image.reshape(-1, 3)[::7].tolist()))


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_has_both_grounds_and_its_colours(dark: bool, tmp_path: Path) -> None:
    from secateur.report.palette import colours

    write_png(resnet(), tmp_path / "report.png", dark=dark)
    width, height, seen = _pixels(tmp_path / "report.png")
    assert (width, height) == (1800, 1275)
    for tone in ("paper", "kept", "gone", "before"):
        colour = colours(dark=dark)[tone]
        assert tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) in seen, tone


@pytest.mark.parametrize(
    "make",
    [hostile, tiny, lambda: Story("nothing", ("before",), ()), lambda: tiny(model="$x^2$ _ \\frac")],
    ids=["hostile", "no scores", "nothing", "mathematics"],
)
def test_any_story_can_be_a_picture(make: Callable[[], Story], tmp_path: Path) -> None:
    write_png(make(), tmp_path / "report.png")
    assert _pixels(tmp_path / "report.png")[0] == 1800
