# SPDX-License-Identifier: Apache-2.0
"""The page of `dmi view` in headless Chromium during a capture: it grows, ends and fails without a reload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dmi_connector.layout import ArraySpec
from dmi_connector.store.read.partial import PartialStore
from tests import storekit as kit
from tests import viewkit
from tests.browserkit import CHOOSE, CHROMIUM, DRIVER, HOLD, NO_CHROMIUM, Page

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NO_CHROMIUM)
SPECS = (ArraySpec("resid_pre", "float32", (0, 1), viewkit.HIDDEN), ArraySpec("q_rot", "float32", (0, 1), 8))
SPECS += (ArraySpec("k_rot", "float32", (0, 1), 4), ArraySpec("topk_ids", "int32", (0, 1), 2))
ABOUT = {
    "num_layers": 2,
    "experts": {"count": 4, "layers": [0, 1]},
    "rotary": True,
    "dims": {"heads": 2, "kv_heads": 1, "head_dim": 4},
}
VALUES = {spec.name: kit.random_bits(spec, 256) for spec in SPECS}
VALUES["topk_ids"] %= 4


@pytest.fixture(scope="module")
def store() -> Iterator[kit.Store]:
    made = kit.Store()
    yield made
    assert made.shutdown()


def shows(page: Page, count: int) -> None:
    """Wait until the page has this number of tokens, all with a colour."""
    page.until(lambda: len(page.all(".token")) == count and all(page.colours()), f"{count} tokens with colours")
    assert page.all(".token.lost") == []
    assert "no value" not in page.text("#text-legend") + page.text("#heat-legend")


def rows(path: Path) -> int:
    """Number of rows that all hooks of a store have; -1 if nothing is known yet. The page sees the same."""
    partial = PartialStore(path)
    if not partial.path.exists():
        return -1
    partial.refresh()
    return -1 if partial.attrs() is None else len(partial.written(np.zeros(0, np.int32)))


def wait_for_rows(path: Path, count: int) -> None:
    kit.until(lambda: rows(path) == count)


def first_rows(
    browser: Chrome, serve: Callable[..., str], store: kit.Store, folder: Path, query: str = ""
) -> tuple[Any, Page]:
    """(a running request with 64 rows, the page that shows it)."""
    record = store.open(folder / "a.zarr", *SPECS, attrs=ABOUT, chunk=64, segment=64)
    store.put(record, VALUES, 0, 64)
    wait_for_rows(folder / "a.zarr", 64)
    page = Page(browser, f"{serve(folder)}#a.zarr{query}")
    shows(page, 64)
    return record, page


def state(page: Page, name: str) -> str:
    return str(page.run("return document.querySelector(`[title='${arguments[0]}'] .sub`)?.textContent ?? ''", name))


def test_a_capture_grows_and_ends_at_the_same_place(
    browser: Chrome, serve: Callable[..., str], store: kit.Store, tmp_path: Path, model: Path
) -> None:
    record = store.open(tmp_path / "a.zarr", *SPECS, attrs=ABOUT, chunk=32, segment=64, key="now")
    wait_for_rows(tmp_path / "a.zarr", 0)
    page = Page(browser, f"{serve(tmp_path, '--model', model)}#a.zarr")
    page.shows("#running", "Running: 0 tokens so far")
    for key, lacks in (("2", "#lens-map-lacks"), ("4", "#experts-lacks"), ("1", "#att-lacks")):
        page.press(key)
        page.shows(lacks, "No token is written yet.")
    page.until(lambda: state(page, "a.zarr").startswith("running · 0 tokens"), "it is in the list")
    store.put(record, VALUES, 0, 32)
    shows(page, 32)
    page.shows("#running", "Running: 32 tokens so far")
    for key, panel in (("2", "#lens-map"), ("4", "#experts"), ("1", "#att")):
        page.press(key)
        page.until(
            lambda panel=panel: "32 " in (page.one(panel).get_attribute("aria-label") or ""), f"{panel} is drawn"
        )
    page.run("window.notReloaded = true")
    page.run(CHOOSE, "hook", "q_rot")
    page.run(CHOOSE, "layer", 1)
    page.all(".token")[20].click()
    page.shows("#token-facts", "row 20 · position 20 · id 20 · generated · q_rot, norm, layer 1: ")
    facts, place = page.text("#token-facts"), page.run("return location.hash")
    store.put(record, VALUES, 32, 32)
    shows(page, 64)
    page.until(lambda: "64 queries" in page.one("#att").get_attribute("aria-label"), "attention of the new tokens")
    page.until(lambda: state(page, "a.zarr").startswith("running · 64 tokens"), "the list")
    assert not page.one("#verify").is_enabled()
    store.put(record, VALUES, 64, 6)
    store.close(record, 70)
    shows(page, 70)
    page.until(lambda: not page.one("#running").is_displayed(), "it has ended")
    page.until(lambda: state(page, "a.zarr").startswith("70 tokens"), "an ordinary entry")
    assert page.one("#verify").is_enabled() and page.chosen() == 20
    assert (page.text("#token-facts"), page.run("return location.hash")) == (facts, place)
    assert page.run("return window.notReloaded") and page.log() == []


def test_the_newest_window_moves_on_and_a_failure_is_said(
    browser: Chrome, serve: Callable[..., str], store: kit.Store, tmp_path: Path
) -> None:
    record, page = first_rows(browser, serve, store, tmp_path, "?count=64")
    store.put(record, VALUES, 64, 64)
    page.shows("#shown", "64 to 127 of 128")
    shows(page, 64)
    page.press("[")
    page.shows("#shown", "0 to 63 of 128")
    store.put(record, VALUES, 128, 64)
    page.shows("#shown", "0 to 63 of 192")
    store.abort(record)
    page.shows("#running", "The request has ended without a store: capture")
    page.shows("#running", "was aborted, and no rows were kept; capture it again.")
    page.shows("#total", "0 captures")
    assert len(page.all(".token")) == 64, "the tokens that were shown must stay"
    assert all("404" in line for line in page.log())


CLOCK = """
window.timers = new Map();
const [later, never] = [window.setTimeout, window.clearTimeout];
let timer = 0;
window.setTimeout = (run, pause, ...more) => {
  if (pause !== 1000) return later(run, pause, ...more);
  window.timers.set(--timer, run);
  return timer;
};
window.clearTimeout = (id) => { if (!window.timers.delete(id)) never(id); };
[window.asked, window.refused] = [0, false];
const get = window.fetch;
window.fetch = async (url, options) => {
  if (!url.startsWith("api/capture/")) return get(url, options);
  window.asked += 1;
  return window.refused ? new Response('{"error": "too much to do"}', { status: 503 }) : get(url, options);
};
"""
"""Timers of one second run when the test says so. asked: number of requests for the capture. refused: whether the
server refuses them.
"""
ASKED = "return window.asked"
PASS = "const due = [...window.timers.values()]; window.timers.clear(); due.forEach((run) => run())"
WAITING = "return window.timers.size"
SEEN = """
Object.defineProperty(document, "hidden", { value: arguments[0], configurable: true });
document.dispatchEvent(new Event("visibilitychange"));
"""
"""Hides or shows the tab."""


@pytest.fixture
def clock(browser: Chrome) -> Iterator[None]:
    """Pages that are loaded from now on have a clock that the test controls."""
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": CLOCK})
    yield
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def both_wait(page: Page) -> None:
    page.until(lambda: page.run(WAITING) == 2, "the list and the capture will be asked for")


@pytest.mark.usefixtures("clock")
def test_it_asks_while_the_tab_is_seen_and_a_request_is_under_way(
    browser: Chrome, serve: Callable[..., str], store: kit.Store, tmp_path: Path
) -> None:
    record, page = first_rows(browser, serve, store, tmp_path)
    both_wait(page)
    page.run(SEEN, True)
    assert page.run(WAITING) == 0
    page.run(SEEN, False)
    both_wait(page)
    store.close(record, 64)
    assert store.flush(kit.PATIENCE)
    page.run(PASS)
    page.until(lambda: not page.one("#running").is_displayed() and len(page.all(".token")) == 64, "it has ended")
    page.until(lambda: state(page, "a.zarr").startswith("64 tokens"), "the list")
    assert page.run(WAITING) == 0, "without a running request, the page must not wait"
    record = store.open(tmp_path / "b.zarr", *SPECS, attrs=ABOUT)
    wait_for_rows(tmp_path / "b.zarr", 0)
    page.run(SEEN, False)
    page.until(lambda: state(page, "b.zarr").startswith("running"), "whoever comes back sees a new request")
    store.abort(record)


@pytest.mark.usefixtures("clock")
def test_known_rows_are_drawn_before_newer_ones_are_requested_and_after_a_server_error(
    browser: Chrome, serve: Callable[..., str], store: kit.Store, tmp_path: Path
) -> None:
    record, page = first_rows(browser, serve, store, tmp_path)
    both_wait(page)
    store.put(record, VALUES, 64, 64)
    wait_for_rows(tmp_path / "a.zarr", 128)
    page.run(CHOOSE, "hook", "q_rot")
    page.shows("#heat-title", "q_rot, norm")
    assert page.one("#heat").get_attribute("aria-label").endswith(" 64 tokens"), "only known tokens must be drawn"
    page.run(HOLD, "api/heat/")
    page.run(PASS)
    page.until(lambda: len(page.all(".token")) == 128 and page.run("return window.held") == 1, "values are awaited")
    assert page.all(".token.lost") == [] and len([one for one in page.colours() if one]) == 64
    asked = page.run(ASKED)
    page.run(PASS)
    assert page.run(ASKED) == asked, "newer rows must not be requested while these are drawn"
    page.run("window.release()")
    shows(page, 128)
    both_wait(page)
    page.run("window.refused = true")
    page.run(PASS)
    page.shows("#fault", "too much to do")
    page.shows("#running", "Running: 128 tokens so far")
    both_wait(page)
    page.run("window.refused = false")
    page.run(PASS)
    page.until(lambda: not page.one("#fault").is_displayed(), "the server answers again")
    store.abort(record)
