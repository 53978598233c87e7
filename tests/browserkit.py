# SPDX-License-Identifier: Apache-2.0
"""The page of `dmi view` in headless Chromium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.storekit import PATIENCE

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NO_CHROMIUM = "no Chromium: apt-get install -y --no-install-recommends chromium chromium-driver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=1440,1290",
)


class Page:
    """The page in the browser."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        browser.get("about:blank")  # otherwise Chromium does not reload the page if only the part after # differs
        browser.get(url)

    def all(self, css: str) -> list[WebElement]:
        return self.browser.find_elements("css selector", css)

    def one(self, css: str) -> WebElement:
        return self.browser.find_element("css selector", css)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css))

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.text('#fault')} {self.log()}"
            time.sleep(0.03)

    def shows(self, css: str, words: str) -> None:
        self.until(lambda: words in self.text(css), f"{css} has {self.text(css)!r}, not {words!r}")

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()

    def pixels(self, css: str) -> str:
        """The pixels of a canvas."""
        return str(self.run("return document.querySelector(arguments[0]).toDataURL()", css))

    def colours(self) -> list[str]:
        return list(self.run("return [...document.querySelectorAll('.token')].map((t) => t.style.background)"))

    def chosen(self) -> int | None:
        found = self.run("return document.querySelector('.token[aria-selected=true]')?.dataset.at ?? null")
        return None if found is None else int(found)

    def drawn(self) -> None:
        """Wait until the text is highlighted in colour."""
        self.until(lambda: self.colours() and all(self.colours()), "the text has no colours")

    def emulate(self, theme: str | None, width: int | None) -> None:
        """Show the page in a theme and with a window width. None restores the default."""
        features = [] if theme is None else [{"name": "prefers-color-scheme", "value": theme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        if width is None:
            self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        else:
            size = {"width": width, "height": 1300, "deviceScaleFactor": 1, "mobile": False}
            self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def log(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


CHOOSE = """
const box = document.getElementById(arguments[0]);
box.value = arguments[1];
box.dispatchEvent(new Event("change"));
"""
HOLD = """
const [real, later, kind] = [window.fetch, window.setTimeout, new RegExp(arguments[0])];
window.held = 0;
window.letGo = new Promise((go) => { window.release = go; });
window.fetch = async (url, options) => {
  if (!kind.test(url)) return real(url, options);
  window.held += 1;
  await window.letGo;
  const answer = await real(url), body = await answer.text();
  later(() => { window.held -= 1; }, 100);
  return new Response(body, answer);
};
"""
"""Hold back the server's responses whose address matches a pattern, until `release()`. held: the addresses of responses
that are held back.
"""
CONTRAST = """
const parts = (c) => c.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (c) => {
  const [r, g, b] = parts(c).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const under = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if ((parts(c)[3] ?? 1) > 0.99) return c; } };
let worst = [99, ""];
for (const e of document.querySelectorAll("body *")) {
  const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!words || e.disabled || e.tagName === "OPTION" || !e.checkVisibility()) continue;
  const [a, b] = [light(getComputedStyle(e).color), light(under(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) worst = [ratio, `${e.tagName} ${e.id} ${e.className} ${e.textContent.slice(0, 30)}`];
}
return worst;
"""
"""The lowest contrast ratio (WCAG 2) of text to its background, and the element that has it."""


def picture(png: bytes, path: Path) -> None:
    """Write a screenshot with few colours, to keep the file small."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(BytesIO(png)).convert("RGB").quantize(128).save(path, optimize=True)
