"""A real browser without a window."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

_WAIT = "-o DPkg::Lock::Timeout=600"  # seconds for another apt-get to finish
_INSTALL = f"apt-get {_WAIT} update && apt-get {_WAIT} install -y chromium chromium-driver"
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
    """Chromium and its driver; installed if that can be done here. Without them tests are skipped, but fail in CI."""
    with Path(tempfile.gettempdir(), "secateur-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may come here at once
        said = install(_INSTALL) if _programs() is None and os.geteuid() == 0 and shutil.which("apt-get") else ""
    found = _programs()
    if found is None:
        told = f"the report is tested in Chromium, which is not here. As root: {_INSTALL}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{told}\n{said}".rstrip())
    return found


def install(command: str, seconds: float = 900) -> str:
    """Run a command, showing what it says as it says it, and give that back; it is ended when it takes too long."""
    said: list[str] = []
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, shell=True, start_new_session=True, text=True, **pipes) as running:
        late = threading.Timer(seconds, os.killpg, (running.pid, signal.SIGKILL))  # and whatever the shell has started
        late.start()
        for line in running.stdout or ():
            said.append(line)
            print(line, end="", file=sys.__stderr__, flush=True)
        late.cancel()
    ended = f"ended with {running.returncode} (after {seconds:g} s it is killed)" if running.returncode else ""
    return "".join(said[-20:]) + ended


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
