# SPDX-License-Identifier: Apache-2.0
"""The page of `dmi view` in headless Chromium: it loads, responds to keys and clicks, and writes nothing to the
console.

With VIEW_PICTURES=DIR, the tests also write the pictures of docs/VIEW.md to DIR.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dmi_connector.layout import ArraySpec
from tests import storekit as kit
from tests import viewkit
from tests.browserkit import CHOOSE, CHROMIUM, CONTRAST, DRIVER, HOLD, NO_CHROMIUM, Page, picture
from tests.shorter import soak

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NO_CHROMIUM)


def test_it_loads_with_an_empty_console(browser: Chrome, serve: Callable[..., str], stores: Path) -> None:
    page = Page(browser, serve(stores))
    page.shows("#total", "34 captures")
    assert page.log() == []
    page.one(".capture").click()
    page.drawn()
    assert page.log() == []
    loaded = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert loaded and all(url.startswith("http://127.0.0.1:") for url in loaded)


def test_a_click_on_a_token_shows_it_and_the_lens(page: Page) -> None:
    page.all(".token")[20].click()
    page.shows("#token-facts", "row 20 · position 20")
    page.until(lambda: len(page.all("#lens tr")) == viewkit.LAYERS + 1, "the lens has a line for each place")
    assert page.text("#lens th") == "final"
    following = page.run("return document.getElementById('token-21').textContent").strip()
    assert page.text("#lens td").strip("·") == following, "the stream of these stores turns to the next token"
    page.until(lambda: len(page.all("#attended button")) == 10, "the token attends to others")
    page.all("#attended button")[3].click()
    page.until(lambda: page.chosen() != 20, "a click on a token attended to goes there")


@pytest.mark.parametrize("other", ["token", *soak("capture")])
@pytest.mark.parametrize(("kind", "box"), [("lens", "#lens"), ("attended", "#attended-box")])
def test_a_late_response_is_not_shown_for_another_token(kind: str, box: str, other: str, page: Page) -> None:
    from selenium.webdriver import Keys

    page.run(HOLD, f"api/{kind}/")
    page.all(".token")[20].click()
    page.shows("#token-facts", "row 20")
    page.until(lambda: page.run("return window.held") == 1, f"{kind} is asked for")
    if other == "token":
        page.run("window.setTimeout = () => 0")  # the page must not request the next token before the response arrives
        page.press(Keys.ARROW_RIGHT)
        page.shows("#token-facts", "row 21")
    else:
        name = page.text("#name")
        page.press("k")
        page.until(lambda: page.text("#name") != name, "another capture")
    page.run("window.release()")
    page.until(lambda: page.run("return window.held") == 0, "the answer has come")
    assert not page.one(box).is_displayed(), "the answer is another token's"
    if other == "token":
        button = page.one("#lens-button")
        assert button.is_enabled() and button.text == "Show top tokens"
        button.click()
        page.until(lambda: len(page.all("#lens tr")) == viewkit.LAYERS + 1, "the lens of this token")


def test_a_click_on_the_heat_map_chooses_layer_and_token(page: Page) -> None:
    from selenium.webdriver import ActionChains

    before, colours = page.pixels("#heat"), page.colours()
    canvas = page.one("#heat")
    ActionChains(page.browser).move_to_element_with_offset(canvas, 0, 20 - canvas.size["height"] // 2).click().perform()
    page.until(lambda: page.chosen() is not None, "a token is chosen")
    assert int(page.run("return document.getElementById('layer').value")) >= viewkit.LAYERS - 2
    assert page.pixels("#heat") != before and page.colours() != colours
    page.shows("#heat-tip", "layer")


def test_hook_and_statistic_change_the_colours(page: Page) -> None:
    seen = {tuple(page.colours())}
    for box, value in (("statistic", "mean"), ("statistic", "value"), ("hook", "q_rot"), ("hook", "resid_final")):
        page.run(
            "const box = document.getElementById(arguments[0]); box.value = arguments[1];"
            "box.dispatchEvent(new Event('change'))",
            box,
            value,
        )
        page.until(lambda: tuple(page.colours()) not in seen, f"{box} {value} changes the colours")
        seen.add(tuple(page.colours()))
    assert not page.one("#layer").is_enabled(), "resid_final exists once"


def test_a_heat_map_is_drawn_again_while_other_values_are_loaded(page: Page) -> None:
    page.run(HOLD, "api/heat/")
    page.run(CHOOSE, "hook", "q_rot")
    page.until(lambda: page.run("return window.held") == 1, "other values are asked for")
    width = page.run("return document.getElementById('heat').width")
    page.run("document.getElementById('heat').parentElement.style.width = '300px'")
    page.until(lambda: page.run("return document.getElementById('heat').width") not in (0, width), "drawn again")
    page.run("window.release()")


def test_an_index_stays_in_its_range(page: Page) -> None:
    set_to = (
        "const box = document.getElementById(arguments[0]); box.value = arguments[1];"
        "box.dispatchEvent(new Event('change')); return document.getElementById('index').value"
    )
    page.run(set_to, "statistic", "value")
    assert page.run(set_to, "index", "5000") == str(viewkit.HIDDEN - 1)
    assert page.run(set_to, "index", "-3") == "0"
    assert page.run(set_to, "hook", "q_rot") == "0"
    assert page.run(set_to, "index", "100") == "100"
    assert page.run(set_to, "hook", "resid_pre") == str(viewkit.HIDDEN - 1), "it has fewer neurons"
    page.shows("#heat-title", f"resid_pre, value {viewkit.HIDDEN - 1} by layer and token")


def test_each_scale_colours_the_heat_map_in_its_own_way(page: Page) -> None:
    shown = {page.pixels("#heat")}
    for value in ("each", "log"):
        page.run(
            "const box = document.getElementById('scale'); box.value = arguments[0];"
            "box.dispatchEvent(new Event('change'))",
            value,
        )
        shown.add(page.pixels("#heat"))
    assert len(shown) == 3


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., str]) -> str:
    """The address of a page of one store with missing values and values that are not finite."""
    root = tmp_path_factory.mktemp("spoilt")
    viewkit.write_spoilt(root)
    return serve(root / "spoilt.zarr") + "#spoilt.zarr?layer=0"


HATCHED = "return [...document.querySelectorAll('.token.lost')].map((t) => [Number(t.dataset.at), t.title])"
PIXEL = """
const [canvas, column, columns, share] = [document.querySelector(arguments[0]), ...[...arguments].slice(1)];
const ratio = window.devicePixelRatio || 1, wide = canvas.width / ratio - 47, high = canvas.height / ratio - 20;
const part = (v) => Math.round(v * ratio);
const [x, y] = [part(46 + ((column + 0.1) * wide) / columns), part(share * high)];
const pixels = canvas.getContext("2d").getImageData(x, y, part((0.8 * wide) / columns), part(6)).data;
const page = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).join(",");
const found = new Set();
for (let i = 0; i < pixels.length; i += 4) found.add(pixels[i + 3] ? [...pixels.slice(i, i + 3)].join(",") : page);
return [...found];
"""
"""The colours of a cell: in a column, at a fraction of the canvas' height. Transparent pixels have the colour of the
page.
"""


def test_a_cell_without_a_value_is_hatched_and_says_why(browser: Chrome, spoilt: str) -> None:
    lost = [[row, "the store lacks this row"] for row in range(4, 8)]
    page = Page(browser, spoilt)
    page.shows("#heat-title", "resid_pre, norm by layer")
    page.until(lambda: page.run(HATCHED) == lost, "missing rows")
    page.run(CHOOSE, "layer", 1)
    assert page.run(HATCHED) == [*lost, [10, "not finite"]]
    assert page.text("#text-legend").endswith("no value") and page.text("#heat-legend").endswith("no value")
    page.all(".token")[10].click()
    page.shows("#token-facts", "resid_pre, norm, layer 1: none (not finite)")
    page.all(".token")[5].click()
    page.shows("#token-facts", "missing · resid_pre, norm, layer 1: none (the store lacks this row)")
    page.run(CHOOSE, "hook", "logits")
    page.shows("#heat-title", "logits, entropy by token")
    lacking = [[row, "no logits of this token"] for row in (*range(4), *range(8, 20), *range(30, 40))]
    assert page.run(HATCHED) == sorted(lost + lacking)
    page.shows("#token-facts", "logits, entropy: none (the store lacks this row)")
    page.all(".token")[19].click()
    page.shows("#token-facts", "logits, entropy: none (no logits of this token)")
    assert page.log() == []


@pytest.mark.parametrize("theme", ["light", *soak("dark")])
def test_cells_without_a_value_do_not_look_like_the_lowest_value(theme: str, browser: Chrome, spoilt: str) -> None:
    browser.execute_cdp_cmd(  # type: ignore[no-untyped-call]
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    page = Page(browser, spoilt)
    page.until(lambda: page.one("#att").get_attribute("aria-label"), "attention is drawn")
    page.until(lambda: page.one("#heat").get_attribute("aria-label"), "the heat map is drawn")
    (lowest,) = page.run(PIXEL, "#heat", 11, 40, 0.7)
    for column, share in ((5, 0.7), (5, 0.2), (10, 0.2)):
        found = page.run(PIXEL, "#heat", column, 40, share)
        assert len(found) > 1 and lowest not in found, f"cell {column} is hatched"
    assert len(page.run(PIXEL, "#heat", 10, 40, 0.7)) == 1, "layer 0 of this token has a value"


def test_a_query_that_is_not_finite_is_hatched_and_keys_after_a_query_are_blank(browser: Chrome, spoilt: str) -> None:
    page = Page(browser, spoilt)
    page.until(lambda: page.one("#att").get_attribute("aria-label"), "attention is drawn")
    assert "4 queries, 4 keys" in page.one("#att").get_attribute("aria-label"), "the store lacks row 4"
    for key in range(3):
        assert len(page.run(PIXEL, "#att", key, 4, 2.3 / 4)) > 1
    (blank,) = page.run(PIXEL, "#att", 3, 4, 2.3 / 4)
    assert page.run(PIXEL, "#att", 3, 4, 0.3 / 4) == [blank]
    assert page.text("#att-legend").endswith("no value")
    page.all(".token")[2].click()
    page.shows("#attended", "no key: the weights are not finite")
    page.run(CHOOSE, "att-layer", 1)
    page.until(lambda: page.all("#attended button"), "the keys of a layer that is finite")


def test_the_token_panel_follows_hook_layer_and_index(page: Page) -> None:
    page.all(".token")[20].click()
    page.shows("#token-facts", "resid_pre, norm, layer 0: ")
    page.until(lambda: len(page.all("#lens tr")) == viewkit.LAYERS + 1, "the lens")
    first = page.text("#token-facts")
    page.run(CHOOSE, "layer", 3)
    page.shows("#token-facts", "resid_pre, norm, layer 3: ")
    assert page.text("#token-facts").split(": ")[1] != first.split(": ")[1]
    page.run(CHOOSE, "hook", "q_rot")
    page.shows("#token-facts", "q_rot, norm, layer 3: ")
    page.run(CHOOSE, "statistic", "value")
    page.shows("#token-facts", "q_rot, value 0, layer 3: ")
    page.run(CHOOSE, "index", 7)
    page.shows("#token-facts", "q_rot, value 7, layer 3: ")
    page.run(CHOOSE, "hook", "resid_final")
    page.shows("#token-facts", "resid_final, value 7: ")
    assert page.one("#lens").is_displayed(), "the lens is the token's, of all layers"


def test_no_value_of_the_previous_hook_is_shown_while_values_are_loaded(page: Page) -> None:
    from selenium.webdriver import ActionChains

    page.all(".token")[20].click()
    page.shows("#token-facts", "resid_pre, norm, layer 0: ")
    ActionChains(page.browser).move_to_element(page.one("#heat")).perform()
    page.shows("#heat-tip", "layer")
    page.run(HOLD, "api/heat/")
    page.run(CHOOSE, "hook", "q_rot")
    page.until(lambda: page.run("return window.held") == 1, "values are asked for")
    assert ":" not in page.text("#token-facts") and page.text("#heat-tip").strip("\u00a0") == ""
    assert page.text("#heat-title").startswith("resid_pre"), "the picture keeps its own title"


def test_a_capture_shows_nothing_of_the_previous_one(page: Page) -> None:
    page.all(".token")[20].click()
    page.shows("#token-facts", "row 20")
    page.run(HOLD, "(tokens|heat|attention)/long")
    page.press("/", *"cmpl-long")
    page.shows("#total", "1 capture")
    page.one(".capture").click()
    page.shows("#name", "long")
    assert page.all(".token") == [] and page.text("#heat-title") == "" == page.text("#text-legend")
    assert page.text("#token-facts").startswith("Click a token") and not page.one("#attended-box").is_displayed()
    blank = (
        "const c = arguments[0]; return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.every((v) => !v)"
    )
    assert all(page.run(blank, page.one(css)) for css in ("#heat", "#att"))


def test_another_head_of_attention_hides_the_keys_of_the_previous_one(page: Page) -> None:
    page.all(".token")[20].click()
    page.shows("#attended-name", "Attends to (layer 0, head 0)")
    page.until(lambda: len(page.all("#attended button")) == 10, "the keys")
    page.run(HOLD, "api/attended/")
    page.run(CHOOSE, "head", 2)
    page.until(lambda: page.run("return window.held") == 1, "keys are asked for")
    assert not page.one("#attended-box").is_displayed()
    page.run("window.release()")
    page.shows("#attended-name", "Attends to (layer 0, head 2)")


def test_another_head_has_another_pattern(page: Page) -> None:
    page.until(lambda: page.one("#att").get_attribute("aria-label"), "attention is drawn")
    before = page.pixels("#att")
    page.run("const h = document.getElementById('head'); h.value = 1; h.dispatchEvent(new Event('change'))")
    page.until(lambda: page.pixels("#att") != before, "another head, another pattern")


def test_the_keyboard_controls_everything(page: Page) -> None:
    from selenium.webdriver import Keys

    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    page.until(lambda: page.chosen() == 1, "arrows go through tokens")
    page.press(Keys.ARROW_UP, Keys.ARROW_UP)
    page.until(lambda: page.run("return document.getElementById('layer').value") == "2", "arrows go through layers")
    page.press(Keys.ENTER)
    page.until(lambda: len(page.all("#lens tr")) == viewkit.LAYERS + 1, "Enter shows the lens")
    name = page.text("#name")
    page.press("k")
    page.until(lambda: page.text("#name") != name, "k opens the capture above")
    page.press("j")
    page.shows("#name", name)
    page.press("/", *"lossy")
    page.shows("#total", "1 capture")
    page.press(Keys.ENTER)
    page.shows("#name", "lossy")
    assert page.run("return document.activeElement.id") == "list"
    page.shows("#incomplete", "64 to 95")
    page.until(lambda: len(page.all(".token.lost")) == 32, "missing rows are marked")
    page.press("/", Keys.ESCAPE)
    page.shows("#total", "34 captures")
    page.press(Keys.TAB)
    ring = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid", "what has the focus can be seen"


def test_a_long_capture_comes_window_by_window(page: Page) -> None:
    from selenium.webdriver import Keys

    page.press("/", *"cmpl-long", Keys.ENTER)
    page.shows("#name", "long")
    page.until(lambda: len(page.all(".token")) == 128, "one window")
    page.press("]", "]")
    page.shows("#shown", "256 to 383 of 3,000")
    page.press("[")
    page.shows("#shown", "128 to 255 of 3,000")
    page.until(lambda: page.run("return document.querySelector('.token').dataset.at") == "128", "its tokens")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    page.shows("#token-facts", "row 127")
    assert page.text("#shown").startswith("0 to 127")
    page.run("const p = document.getElementById('place'); p.value = 2999; p.dispatchEvent(new Event('input'))")
    page.shows("#shown", "2,944 to 2,999 of 3,000")
    page.until(lambda: len(page.all(".token")) == 56, "the last window")


def test_verify_says_that_a_store_is_sound(page: Page) -> None:
    page.one("#verify").click()
    page.shows("#verdict", "Sound")


def test_a_store_says_what_it_lacks(browser: Chrome, serve: Callable[..., str], stores: Path) -> None:
    page = Page(browser, serve(stores / "bare.zarr"))
    page.shows("#name", "bare")
    page.shows("#att-lacks", "Capture q_rot and k_rot")
    page.shows("#lens-lacks", "Capture the hooks resid_pre and resid_final")
    page.drawn()
    assert page.text(".token") == "0", "without a tokenizer tokens are ids"


def test_the_previous_capture_is_hidden_if_another_cannot_be_opened(
    browser: Chrome, serve: Callable[..., str], tmp_path: Path
) -> None:
    owner = kit.Store(1 << 20)
    for name in ("sound", "damaged"):
        owner.write(tmp_path / f"{name}.zarr", [ArraySpec("q", "float32", (0,), 8)], 20, attrs={"num_layers": 1})
    assert owner.shutdown()
    (tmp_path / "damaged.zarr/q/zarr.json").unlink()
    page = Page(browser, f"{serve(tmp_path)}#sound.zarr")
    page.shows("#name", "sound")
    page.drawn()
    for name, shown in (("damaged", False), ("sound", True)):
        next(entry for entry in page.all(".capture") if name in entry.text).click()
        page.until(lambda shown=shown: page.one("#view").is_displayed() == shown, "the capture")
        page.until(lambda shown=shown: page.one("#fault").is_displayed() != shown, "the fault")
    page.log()  # the browser logs the response with status 400


def test_ten_thousand_captures_have_few_elements(browser: Chrome, serve: Callable[..., str], tmp_path: Path) -> None:
    viewkit.write_list(tmp_path / "many", 9_999)
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "many/newest.zarr", [ArraySpec("q", "float32", (0,), 8)], 20, attrs={"num_layers": 1})
    assert owner.shutdown()
    page = Page(browser, serve(tmp_path / "many"))
    page.shows("#total", "10,000 captures")
    page.shows("#name", "newest.zarr")
    assert 5 < len(page.all(".capture")) < 60
    page.run("document.getElementById('list').scrollTop = 1e9")
    page.until(lambda: page.run("return document.querySelector('[title=\"run-00000.zarr\"]')"), "the last")
    assert len(page.all(".capture")) < 60
    asked = page.run(
        "return performance.getEntriesByType('resource').filter((e) => e.name.includes('captures')).length"
    )
    assert asked <= 3, "pieces between are not asked for"
    assert page.log() == []


@pytest.mark.parametrize("theme", ["dark", *soak("light")])
def test_text_can_be_read_in_light_and_dark(theme: str, page: Page) -> None:
    page.browser.execute_cdp_cmd(  # type: ignore[no-untyped-call]
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    page.all(".token")[30].click()
    page.until(lambda: len(page.all("#lens tr")) == viewkit.LAYERS + 1, "the lens")
    page.until(lambda: len(page.all("#attended button")) == 10, "the token attends to others")
    worst = page.run(CONTRAST)
    assert worst[0] >= 4.5, f"{worst[1]} has a contrast of {worst[0]:.2f}"
    folder = os.environ.get("VIEW_PICTURES")
    if folder:
        page.run(SETTING)
        page.until(lambda: "layer 8" in (page.one("#att").get_attribute("aria-label") or ""), "layer 8")
        page.all(".token")[30].click()
        page.until(lambda: page.one("#lens").is_displayed() and page.one("#attended").is_displayed(), "all is there")
        page.run("document.activeElement.blur()")
        picture(page.browser.get_screenshot_as_png(), Path(folder) / f"view-{theme}.png")


SETTING = """
for (const [id, value] of [["layer", 9], ["att-layer", 8], ["head", 0]]) {
  const box = document.getElementById(id);
  box.value = value;
  box.dispatchEvent(new Event("change"));
}
"""
"""The state of the page in the pictures."""
