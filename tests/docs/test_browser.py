"""The built pages in a real browser, wide and narrow: readable, complete, and nothing from outside.

Run in the environment of the docs, after `make docs`. Pictures of all pages are left in site-screenshots/.
"""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SITE = REPOSITORY / "site"
PICTURES = REPOSITORY / "site-screenshots"
PAGES = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if page.name != "404.html")
WIDTHS = (1280, 400)
CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TOO_WIDE = """() => [...document.querySelectorAll('.md-content *')]
    .filter(node => node.getBoundingClientRect().right > innerWidth + 1
        && !node.closest('.md-typeset__scrollwrap, pre, .md-nav, .highlight'))
    .map(node => node.tagName + ' ' + node.textContent.trim().slice(0, 60))"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; see scripts/setup_browser.sh"),
    pytest.mark.skipif(not PAGES, reason="there are no pages in site/; see `make docs`"),
]


@dataclass
class Seen:
    """What a page did while it was looked at."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The URL of the built pages, on loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; see `make test-docs`")
    shutil.rmtree(PICTURES, ignore_errors=True)
    with playwright.sync_playwright() as running:
        # playwright gives each start a new folder for its user data
        opened = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


def open_page(browser: Any, seen: Seen, url: str, width: int) -> Any:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(url, wait_until="networkidle")
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable(browser: Any, site: str, seen: Seen, name: str, width: int) -> None:
    page = open_page(browser, seen, f"{site}/{name}", width)
    try:
        picture = PICTURES / str(width) / f"{name.removesuffix('.html').replace('/', '-')}.png"
        page.screenshot(path=picture, full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, page.evaluate(TOO_WIDE)
        assert page.evaluate(TOO_WIDE) == [], "reaches out of the page, where nobody can scroll to"
        broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(broken) == []
        assert page.locator("h1").count() == 1
        text = "getComputedStyle(document.querySelector('.md-content p, .md-content td')).fontSize"
        assert float(page.evaluate(text).removesuffix("px")) >= 12
        assert seen.errors == []
        assert [url for url in seen.requests if not url.startswith((site, "data:", "blob:"))] == []
    finally:
        page.close()


def test_every_page_is_reached_from_the_first_one(browser: Any, site: str, seen: Seen) -> None:
    """By the navigation as it is on a telephone: behind a button."""
    page = open_page(browser, seen, f"{site}/index.html", 400)
    try:
        page.locator("label.md-header__button[for=__drawer]").click()
        page.wait_for_timeout(400)
        assert page.locator(".md-nav--primary").bounding_box()["x"] >= 0, "the drawer did not open"
        links = page.eval_on_selector_all(".md-nav--primary a[href]", "links => links.map(link => link.href)")
        reached = {link.partition("#")[0].removeprefix(f"{site}/") or "index.html" for link in links}
        assert set(PAGES) <= reached | {"index.html"}
    finally:
        page.close()


def test_search_finds_an_error(browser: Any, site: str, seen: Seen) -> None:
    page = open_page(browser, seen, f"{site}/index.html", 1280)
    try:
        # Typed key by key: the search reads its field at a keyup, and filling a field gives none.
        page.locator("input.md-search__input").press_sequentially("TransferCorrupted")
        page.locator(".md-search-result__item a").first.wait_for(timeout=20_000)
        found = page.locator(".md-search-result__item").all_inner_texts()
        assert any("fails" in text for text in found), found
    finally:
        page.close()
