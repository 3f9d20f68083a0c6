"""Real headless Chromium for tests of pages; what it is asked is in the page's own words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="chromium and chromedriver are not there (Debian: apt-get install chromium chromium-driver)",
)

CONTRAST = """
const parse = text => { const m = text.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
const light = c => { const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
const ground = node => { const layers = []; for (let n = node; n instanceof Element; n = n.parentElement)
    layers.push(parse(getComputedStyle(n).backgroundColor));
  return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]); };
const bad = []; let seen = 0;
document.querySelectorAll('details').forEach(one => one.open = true);
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
  if (!text || !node.getClientRects().length || node.closest('style')) continue;
  const style = getComputedStyle(node), back = ground(node);
  const ink = over(parse(node.closest('svg') ? style.fill : style.color), back);
  const [a, b] = [light(ink), light(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
  const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  seen += 1;
  if (ratio < (large ? 3 : 4.5)) bad.push([text.slice(0, 40), ratio.toFixed(2), style.color]);
}
return {seen, bad};
"""


@contextmanager
def browser(width: int, *, dark: bool) -> Iterator[Any]:
    """A browser of that width in CSS pixels; below 500 it is a phone."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield driver
    finally:
        driver.quit()


def faults(driver: Any, page: Path) -> list[str]:
    """What is wrong with a page as it is rendered: messages of the console, sideways scrolling, contrast below AA."""
    driver.get(page.as_uri())
    width, inner = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    contrast = driver.execute_script(CONTRAST)
    wide = driver.execute_script(WIDE)
    found = [f"console: {one['message']}" for one in driver.get_log("browser")]
    found += [f"scrolls sideways: {width} > {inner}"] if width > inner else []
    found += [f"wider than the page: {one}" for one in wide[:5]]
    found += [f"contrast: {one}" for one in contrast["bad"][:10]]
    return found + ([] if contrast["seen"] > 50 else [f"only {contrast['seen']} texts were seen"])


WIDE = """
return [...document.querySelectorAll('body *')].filter(one => !one.closest('svg, pre') && one.getClientRects().length
  && one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(innerWidth < 700 ? '.scroll:not(.cards)' : '.scroll')
  && !one.closest('thead'))
  .map(one => one.tagName + ' ' + one.textContent.slice(0, 40));
"""
