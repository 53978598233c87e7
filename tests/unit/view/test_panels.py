# SPDX-License-Identifier: Apache-2.0
"""The panels of `dmi view` in headless Chromium show the values of the stores."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.analysis.attribution import logit_attribution
from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.analysis.unembedding import Unembedding, log_softmax
from tests import viewkit
from tests.browserkit import CHOOSE, CHROMIUM, CONTRAST, DRIVER, NO_CHROMIUM, Page, picture
from tests.shorter import soak

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory, model: Path, serve: Callable[..., str]) -> tuple[Path, str, Path]:
    """(path of the store "parts", address of its page, path of the autoencoder)."""
    root = tmp_path_factory.mktemp("panels")
    (root / "captures").mkdir()
    flag, sae = viewkit.write_panels(root / "captures", model)
    return root / "captures/parts.zarr", serve(root / "captures", "--model", model, flag, sae), Path(sae)


@pytest.fixture
def parts(browser: Chrome, panels: tuple[Path, str, Path]) -> Iterator[Callable[[str], Page]]:
    """parts(query): the page of the store "parts", with a query in its address."""
    shown: list[Page] = []

    def at(place: str) -> Page:
        shown.append(Page(browser, f"{panels[1]}#parts.zarr?{place}"))
        shown[-1].shows("#name", "parts")
        shown[-1].until(lambda: len(shown[-1].all(".token")) == 60, "its tokens")
        return shown[-1]

    yield at
    assert all(page.log() == [] for page in shown[-1:])


def predictions(store: Path, model: Path) -> np.ndarray:
    """Log-probabilities of the token after each row, [rows, vocabulary]."""
    with open_capture(store) as cap:
        return log_softmax(Unembedding.load(model).logits(cap.numpy("resid_final")))


def said(page: Page, css: str = "#token-facts") -> float:
    """The number at the end of the text of an element."""
    return float(page.text(css).split(": ")[-1].replace(",", ""))


HOVER = """
const [css, column, columns, line, lines, left, below] = arguments, canvas = document.querySelector(css);
const box = canvas.getBoundingClientRect(), wide = box.width - left - (left && 1), high = box.height - below;
const [x, y] = [box.left + left + ((column + 0.5) * wide) / columns, box.top + ((line + 0.5) * high) / lines];
canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
"""


def hover(page: Page, css: str, column: int, columns: int, line: int, lines: int, labels: bool = True) -> None:
    """Move the pointer over a cell of a canvas. line: counted from above. labels: whether the canvas has labels on the
    left and below.
    """
    page.run(HOVER, css, column, columns, line, lines, *((46, 20) if labels else (0, 0)))


def test_the_newest_capture_opens_at_a_middle_layer_of_the_residual_stream(
    browser: Chrome, panels: tuple[Path, str, Path]
) -> None:
    page = Page(browser, panels[1])
    page.shows("#name", "parts")
    page.drawn()
    page.shows("#text-legend", "resid_pre, norm, layer 6: ")
    assert page.text(".capture .said").startswith("The lighthouse keeper counted the ships each evening.")


def test_texts_are_searched(page: Page) -> None:
    page.press("/", *"LANTERN answered")
    page.shows("#total", "3 captures")
    page.press(*" nobody")
    page.shows("#total", "0 captures")


SEARCH = """
const box = document.getElementById("search");
box.value = arguments[0];
box.dispatchEvent(new Event("input"));
"""
GOES_ON = """
const real = window.fetch;
Object.assign(window, { pending: 2, asked: 0 });
window.fetch = async (url, options) => {
  const answer = await real(url, options);
  if (!url.startsWith("api/captures")) return answer;
  window.asked += 1;
  return new Response(JSON.stringify({ ...await answer.json(), pending: window.pending }), answer);
};
"""
"""Makes each response say that two texts are left to be read, until `pending` is set to 0."""


def test_the_list_can_be_scrolled_during_a_search(page: Page) -> None:
    page.run(GOES_ON)
    page.run(SEARCH, "run-")
    page.shows("#total", "30 captures, 2 texts to be read")
    page.run("document.getElementById('list').scrollTop = 500")
    asked = page.run("return window.asked")
    page.until(lambda: page.run("return window.asked") >= asked + 3, "the search must continue")
    page.run("window.pending = 0")
    page.until(lambda: page.text("#total") == "30 captures", "it ends")
    assert page.run("return document.getElementById('list').scrollTop") == 500
    page.run(SEARCH, "run-000")
    page.until(lambda: page.run("return document.getElementById('list').scrollTop") == 0, "another begins at the top")


def test_a_token_has_its_log_probability_and_alternatives(
    parts: Callable[[str], Page], panels: tuple[Path, str, Path], model: Path
) -> None:
    own = predictions(panels[0], model)
    with open_capture(panels[0]) as cap:
        ids = cap.token_ids
    page = parts("hook=prediction&token=20")
    page.shows("#token-facts", "prediction, log-probability: ")
    assert said(page) == pytest.approx(own[19, ids[20]], rel=1e-3)
    rank = (own[19] > own[19, ids[20]]).sum() + 1
    page.shows("#alternatives-name", f"this token is number {rank})")
    best = own[19].argmax()
    assert page.run("return document.querySelector('#alternatives small').textContent").strip() == (
        f"{100 * np.exp(own[19, best]):.1f} %"
    )
    page.run(CHOOSE, "statistic", "entropy")
    page.shows("#token-facts", "prediction, entropy: ")
    assert said(page) == pytest.approx(-(np.exp(own[19]) * own[19]).sum(), rel=1e-3)
    page.run("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", page.all(".token")[40])
    rank = (own[39] > own[39, ids[40]]).sum() + 1
    page.shows("#popup", f"this token is number {rank})")
    assert len(page.all("#popup li")) in (10, 11) and page.one("#popup .came").is_displayed()
    assert page.run("return document.querySelector('.token').title") == "no prediction of this token"


def test_the_lens_of_all_tokens(parts: Callable[[str], Page], panels: tuple[Path, str, Path], model: Path) -> None:
    page = parts("panel=lens&token=0")
    page.until(
        lambda: f"{viewkit.LAYERS + 1} places, 60 tokens" in (page.one("#lens-map").get_attribute("aria-label") or ""),
        "the lens",
    )
    with open_capture(panels[0]) as cap:
        own = log_softmax(Unembedding.load(model).logits(cap.numpy("resid_pre", 0)))
        expected = own[57, cap.token_ids[58]]

    def first_layer() -> str:
        hover(page, "#lens-map", 58, 60, viewkit.LAYERS, viewkit.LAYERS + 1)
        return page.text("#lens-tip")

    page.until(lambda: first_layer().startswith("0, token 58") and "log-prob" in first_layer(), "the lowest layer")
    assert float(first_layer().split("log-probability ")[1].split(",")[0]) == pytest.approx(expected, rel=1e-3)
    before = page.pixels("#lens-map")
    page.run(CHOOSE, "lens-statistic", "entropy")
    page.until(lambda: page.pixels("#lens-map") != before, "entropy")


FIRST_PIECE = """
const real = window.fetch;
window.signals = [];
window.fetch = async (url, options) => {
  if (!url.startsWith("api/predicted/")) return real(url, options);
  window.signals.push(options.signal);
  const [first] = (await (await real(url)).text()).split("\\n");
  return new Response(new ReadableStream({ start: (out) => out.enqueue(new TextEncoder().encode(`${first}\\n`)) }));
};
"""
"""Lets only the first piece of the lens arrive. signals: the abort signals of the requests."""


def test_the_lens_of_the_chosen_token_comes_first_and_another_panel_aborts_the_rest(
    parts: Callable[[str], Page],
) -> None:
    page = parts("token=20")
    page.run(FIRST_PIECE)

    def tip(column: int) -> str:
        for at in (column + 1, column):  # a pointer that does not move causes no event
            hover(page, "#lens-map", at, 60, viewkit.LAYERS, viewkit.LAYERS + 1)
        return page.text("#lens-tip")

    page.press("2")
    page.until(lambda: "log-probability" in tip(20), "the chosen token")
    assert tip(30) == "place 0: awaited"
    page.press("1")
    page.until(lambda: page.run("return window.signals[0].aborted"), "nobody waits for the rest")
    page.press("2")
    page.until(lambda: page.run("return window.signals.length") == 2, "it is asked for again")


def test_the_parts_of_a_logit(parts: Callable[[str], Page], panels: tuple[Path, str, Path], model: Path) -> None:
    page = parts("panel=attribution&token=30")
    with open_capture(panels[0]) as cap:
        shares, labels = logit_attribution(cap, Unembedding.load(model))
    page.until(lambda: len(page.all("#attribution li")) == len(labels), "a line for each part")
    assert page.run("return [...document.querySelectorAll('#attribution .label')].map((e) => e.textContent)") == labels
    values = page.run("return [...document.querySelectorAll('#attribution small')].map((e) => Number(e.textContent))")
    np.testing.assert_allclose(values, shares[:, 30], rtol=2e-3, atol=1e-3)
    assert float(page.text("#attribution-title").split(": ")[1].split(",")[0]) == pytest.approx(
        shares[:, 30].sum(), rel=1e-3
    )


def test_experts_and_their_load(parts: Callable[[str], Page], panels: tuple[Path, str, Path]) -> None:
    page = parts("panel=experts&layer=3&token=0")
    with open_capture(panels[0]) as cap:
        ids, weights = cap.numpy("topk_ids"), cap.numpy("topk_weights")
    page.shows("#load-title", "Load of layer 3, all 60 rows")
    page.until(lambda: len(page.all("#load li")) == 8, "a line for each expert")
    shown = "return [...document.querySelectorAll('#load li')].map((e) => e.title)"
    assert page.run(shown)[5] == "expert 5: chosen 60 times" and page.run(shown)[0] == "expert 0: chosen 0 times"
    hover(page, "#experts", 58, 60, 0, viewkit.LAYERS)
    layer, token = viewkit.LAYERS - 1, 58
    pairs = [f"{e} ({f'{w:.3f}'.rstrip('0')})" for e, w in zip(ids[layer, token], weights[layer, token], strict=True)]
    page.shows("#experts-tip", f"layer {layer}, token {token}")
    assert page.text("#experts-tip").endswith(f"experts {', '.join(pairs)}")
    page.run(CHOOSE, "layer", 4)
    page.shows("#load-title", "Load of layer 4")
    counts = np.bincount(ids[4].ravel(), minlength=8)
    page.until(lambda: page.run(shown)[2] == f"expert 2: chosen {counts[2]} times", "the load of the other layer")


def test_latents_of_a_token_and_contexts_of_a_latent(
    parts: Callable[[str], Page], panels: tuple[Path, str, Path]
) -> None:
    page = parts("panel=latents&token=30")
    with open_capture(panels[0]) as cap:
        values = SparseEncoder.load(panels[2]).encode(cap.numpy("resid_pre", 6))
    order = np.argsort(-values[30], kind="stable")[: (values[30] > 0).sum()]
    page.until(lambda: len(page.all("#latents li")) == min(len(order), 20), "its latents")
    assert [int(e.text) for e in page.all("#latents button")] == order[:20].tolist()
    best = int(order[0])
    page.one("#latents button").click()
    page.shows("#token-facts", f"latents, value {best}: ")
    assert said(page) == pytest.approx(values[30, best], rel=1e-3)
    active = int((values[:, best] > 0).sum())
    page.shows("#latent-title", f"Latent {best}: active in {100 * active / 60:.1f} % of 60 rows of 1 captures")
    page.until(lambda: len(page.all("#contexts li")) == min(active, 12), "its contexts")
    top = int(values[:, best].argmax())
    assert page.run("return document.querySelector('#contexts button').title") == f"parts.zarr, row {top}"
    total = page.run("return [...document.querySelectorAll('#histogram li')].map((e) => e.title)")
    assert sum(int(title.split(": ")[1].split()[0]) for title in total) == active
    page.one("#contexts button").click()
    page.until(lambda: page.chosen() == top, "a context leads to its token")


def test_all_heads_have_thumbnails_that_mark_the_text(page: Page, stores: Path) -> None:
    page.run(CHOOSE, "att-layer", 8)
    filled = "return [...document.querySelectorAll('.head canvas')].filter((c) => c.width === 128).length"
    page.until(lambda: page.run(filled) == viewkit.HEADS, "all heads")
    hover(page, ".head:nth-child(2) canvas", 50, 128, 100, 128, labels=False)
    page.shows("#att-tip", "head 1, token 100")
    with open_capture(stores / "story.zarr") as cap:
        expected = cap.attention(8, 1, slice(100, 101))[0, 50]
    assert said(page, "#att-tip") == pytest.approx(expected, rel=2e-3)
    marked = page.run("return [...document.querySelectorAll('.pointed')].map((t) => Number(t.dataset.at))")
    assert marked == [50, 100]
    page.all(".head")[2].click()
    page.until(lambda: "head 2 in layer 8" in page.one("#att").get_attribute("aria-label"), "a click shows a head")


def test_two_captures_are_shown_side_by_side(page: Page, stores: Path) -> None:
    from selenium.webdriver import Keys

    page.press("c", "/", *"cmpl-lossy", Keys.ENTER)
    page.shows("#side-name", "lossy")
    page.until(lambda: len(page.all("#side-text .token")) == 128, "its tokens")
    page.until(lambda: len(page.all("#side-text .token.lost")) == 32, "its missing rows")
    assert page.text("#name") == "story"
    with open_capture(stores / "lossy.zarr", allow_incomplete=True) as cap:
        norm = np.linalg.norm(cap.numpy("resid_pre", 11)[0])
    hover(page, "#side-heat", 0, 128, 0, viewkit.LAYERS)
    page.shows("#side-tip", "layer 11, token 0: ")
    assert said(page, "#side-tip") == pytest.approx(norm, rel=1e-3)
    page.run("document.getElementById('side-token-7').click()")
    page.until(lambda: page.chosen() == 7, "a token is chosen in both")
    assert "with=lossy.zarr" in page.run("return location.hash")
    page.press(Keys.ESCAPE)
    assert not page.one("#side").is_displayed() and "with=" not in page.run("return location.hash")


def test_the_address_has_the_state_of_the_page(page: Page) -> None:
    page.run(CHOOSE, "hook", "q_rot")
    page.run(CHOOSE, "layer", 5)
    page.run("document.getElementById('tab-lens').click()")
    page.all(".token")[33].click()
    page.shows("#token-facts", "row 33")
    address = page.run("return location.href")
    what = parse_qs(address.split("?")[1])
    assert [what[key][0] for key in ("hook", "layer", "token", "panel")] == ["q_rot", "5", "33", "lens"]
    again = Page(page.browser, address)
    again.shows("#token-facts", "row 33")
    again.shows("#text-legend", "q_rot, norm, layer 5: ")
    assert again.one("#panel-lens").is_displayed() and not again.one("#panel-attention").is_displayed()
    again.press("1")
    assert again.one("#panel-attention").is_displayed()
    again.run("history.back()")
    again.until(lambda: again.run("return document.readyState") == "complete", "the page")


def test_a_picture_is_saved(page: Page) -> None:
    from PIL import Image

    page.run(
        "URL.createObjectURL = (blob) => { window.saved = blob; return ''; };"
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; };"
    )
    page.press("s")
    page.until(lambda: page.run("return window.named"), "a picture")
    assert page.run("return window.named") == "story.png"
    data = page.browser.execute_async_script(
        "const reader = new FileReader(), done = arguments[0];"
        "reader.onload = () => done(reader.result.split(',')[1]); reader.readAsDataURL(window.saved);"
    )
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    assert image.width == 1200 and image.height > 500
    colours = {image.getpixel((x, y)) for x in range(0, 1200, 7) for y in range(0, image.height, 7)}
    assert len(colours) > 50, "text, heat map and attention"


@pytest.mark.parametrize(("theme", "width"), [("light", 400), ("dark", 1600), *soak(("dark", 400), ("light", 1600))])
def test_panels_fit_and_can_be_read(theme: str, width: int, parts: Callable[[str], Page]) -> None:
    page = parts("hook=prediction&token=30")
    page.emulate(theme, width)
    try:
        page.shows("#alternatives-name", "Predicted here")
        for key, filled in (("2", "#lens-legend i"), ("3", "#attribution li"), ("4", "#load li"), ("5", "#latents li")):
            page.press(key)
            page.until(lambda filled=filled: page.all(filled), filled)
            worst = page.run(CONTRAST)
            assert worst[0] >= 4.5, f"{worst[1]} has a contrast of {worst[0]:.2f}"
            wide = page.run("return document.documentElement.scrollWidth")
            assert wide <= width, f"panel {key}: something lies outside the window"
        folder = os.environ.get("VIEW_PICTURES")
        if folder and (theme, width) == ("light", 1600):
            page.press("3")
            page.run("document.getElementById('hook').blur()")
            picture(page.browser.get_screenshot_as_png(), Path(folder) / "view-prediction-light.png")
    finally:
        page.emulate(None, None)
