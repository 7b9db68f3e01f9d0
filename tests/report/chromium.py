"""A real browser without a window."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

_INSTALL = "apt-get update && apt-get install -y chromium chromium-driver"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def _programs() -> tuple[str, str] | None:
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return found if all(found) else None  # type: ignore[return-value]


def installed() -> tuple[str, str]:
    """Chromium and its driver; installed if that can be done here, and a failure, not a skip, if it cannot."""
    with Path(tempfile.gettempdir(), "secateur-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may come here at once
        if _programs() is None and os.geteuid() == 0 and shutil.which("apt-get"):
            subprocess.run(_INSTALL, shell=True, check=False, capture_output=True, timeout=600)
    found = _programs()
    if found is None:
        pytest.fail(f"the report is tested in Chromium, which is not here. As root: {_INSTALL}")
    return found


class Browser:
    """What the tests do with a page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.logged()
        self.requested()
        self.driver.get(path.as_uri())

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def wait(self, script: str) -> Any:
        """Until the script returns something true."""
        return WebDriverWait(self.driver, 20, poll_frequency=0.05).until(lambda _: self.run(script), message=script)

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def logged(self) -> list[str]:
        """What the console has said since last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """What the page has asked for since last asked."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    program, driver = installed()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        started = webdriver.Chrome(options, Service(driver))
        try:
            yield Browser(started)
        finally:
            started.quit()
