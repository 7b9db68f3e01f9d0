"""Pictures of a report for the documentation.

    python tests/report/screenshot.py REPORT.html docs/images

writes report-light.png and report-dark.png: the top of the page, and the explorer below it.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from chromium import Browser, browser

_WIDTH = 1280
_CHARTS = "[...document.querySelectorAll('.chart')]"


def picture(chrome: Browser, page: Path, *, dark: bool) -> bytes:
    """Everything down to the matrix of what is tied to what, with every chart drawn."""
    chrome.open(page, width=_WIDTH, height=4000, dark=dark)
    chrome.run("for (const part of document.querySelectorAll('#stages, #sweep')) part.remove()")
    chrome.run("document.documentElement.style.scrollbarWidth = 'none'")
    chrome.wait(f"return {_CHARTS}.every((chart) => chart.querySelector('.main-svg'))")
    bottom = chrome.run("return document.getElementById('chart-ties').getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": _WIDTH, "height": bottom + 8, "scale": 1}
    return base64.b64decode(chrome.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"])


def main(page: str, folder: str) -> None:
    with browser() as chrome:
        for dark in (False, True):
            path = Path(folder, f"report-{'dark' if dark else 'light'}.png")
            path.write_bytes(picture(chrome, Path(page).resolve(), dark=dark))
            print(path, path.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
