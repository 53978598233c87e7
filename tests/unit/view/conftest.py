# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of the page: stores, and servers and a browser per file, which take CPU time while open."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import viewkit
from tests.browserkit import CHROMIUM, DRIVER, FLAGS, Page
from tests.storekit import PATIENCE

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return viewkit.make_lens_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    root = tmp_path_factory.mktemp("captures")
    viewkit.write_stores(root, model, many=30)
    return root


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """serve(path, *options): the address that `dmi view` prints. Tests with the same arguments share a server."""
    started: list[subprocess.Popen[str]] = []

    @functools.cache
    def start(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "dmi_connector.cli", "view", *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.terminate()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: make env")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Chrome, serve: Callable[..., str], stores: Path, model: Path) -> Iterator[Page]:
    """A new page with the store "story" open. Its console must be empty at the end."""
    shown = Page(browser, f"{serve(stores, '--model', model)}#story.zarr?layer=0")
    shown.shows("#name", "story")
    shown.drawn()
    shown.log()
    yield shown
    assert shown.log() == []
