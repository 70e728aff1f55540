"""Look at the site in a real browser.

    python tests/docs/browser.py [--screenshots FOLDER] [--site FOLDER]

Builds the site, serves it on localhost and checks with headless Chromium: every page of the navigation loads without an
error of the console and from this host alone, search finds a function, the dark mode can be chosen, and a narrow screen
scrolls in one direction. Needs Debian's `chromium` (or CHROMIUM=path) and, from PyPI, `playwright`, whose own download
of a browser is not used.
"""

import argparse
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
NARROW = {"width": 375, "height": 800}
WIDE = {"width": 1280, "height": 900}
PICTURES = (
    "index",
    "guides/pytorch",
    "guides/tuning",
    "reproducible_training",
    "explanation/order",
    "reference/softmax",
    "figures/cuda-nvidia-h200",
    "comparison",
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *arguments):
        """Say nothing."""


def served(folder):
    """An address that serves the folder, and its server."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", server


def missing():
    """What this machine lacks, in words; nothing where all is there."""
    if chromium() is None:
        return "Chromium, which is not installed: apt-get install chromium, or CHROMIUM=path/of/chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright, which is not installed: pip install playwright"
    return None


def chromium():
    """Where the browser is."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Check:
    """A browser at a site, and what it complained about."""

    def __init__(self, context, address, pictures):
        self.address, self.pictures, self.errors = address, pictures, []
        self.page = context.new_page()
        self.page.on(
            "console", lambda m: m.type in ("error", "warning") and self.errors.append(f"{self.page.url}: {m.text}")
        )
        self.page.on("pageerror", lambda e: self.errors.append(f"{self.page.url}: {e}"))
        self.page.on("response", lambda r: r.status >= 400 and self.errors.append(f"{r.url}: {r.status}"))
        self.page.on(
            "request",
            lambda r: r.url.startswith((address, "data:", "blob:")) or self.errors.append(f"asks for {r.url}"),
        )

    def open(self, path):
        """Load a page."""
        self.page.goto(f"{self.address}/{path}", wait_until="load")

    def picture(self, name):
        """Keep what is seen."""
        if self.pictures:
            self.page.screenshot(path=self.pictures / f"{name.replace('/', '-')}.png")

    def every_page(self):
        """Each page of the navigation loads, has one heading of the first order, and fits a narrow screen."""
        self.open("index.html")
        links = self.page.eval_on_selector_all(".md-nav--primary a.md-nav__link[href]", "all => all.map(a => a.href)")
        pages = sorted({link.split("#")[0] for link in links if link.startswith(self.address)})
        assert len(pages) > 40, f"the navigation has {len(pages)} pages"
        for url in pages:
            self.page.set_viewport_size(NARROW)
            self.page.goto(url, wait_until="load")
            assert self.page.locator("h1").count() == 1, f"{url} has {self.page.locator('h1').count()} headings"
            wide = self.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= NARROW["width"], f"{url} is {wide} wide on a screen of {NARROW['width']}"
        return pages

    def questions(self, pages):
        """Each of `questions.md` is answered on a page of the navigation, under its heading."""
        rows = re.findall(
            r"(?m)^\| (.+?) \| (\S+\.html) \| (.+?) \|$", Path(__file__).with_name("questions.md").read_text()
        )
        assert len(rows) >= 30
        headings = "all => all.map(h => h.firstChild.textContent.trim())"
        for question, page, heading in rows:
            url = f"{self.address}/{page}"
            assert url in pages, f"{question} {page} is not in the navigation"
            if self.page.url != url:
                self.open(page)
            found = self.page.eval_on_selector_all("article h1, article h2, article h3", headings)
            assert heading in found, f"{question} {page} has no heading {heading!r}: {found}"
        return len(rows)

    def tabs(self):
        """A click on a tab leads to its section, and a click there to a page."""
        self.page.set_viewport_size(WIDE)
        self.open("index.html")
        self.page.click(".md-tabs >> text=Guides")
        self.page.click(".md-nav--primary >> text=Mixture of experts")
        self.page.wait_for_url("**/guides/mixture_of_experts.html")

    def search(self):
        """The search finds a function, and its first results lead to the reference."""
        self.open("index.html")
        self.page.click(".md-search__input")
        self.page.fill(".md-search__input", "cross_entropy")
        self.page.wait_for_selector(".md-search-result__item a", timeout=20_000)
        found = self.page.eval_on_selector_all(".md-search-result__item a", "all => all.map(a => a.href)")
        assert any("reference/cross_entropy.html" in link for link in found), found
        self.picture("search")

    def dark(self):
        """The toggle changes the colors, and the choice outlives a click on a link."""
        self.open("index.html")
        scheme = "document.body.getAttribute('data-md-color-scheme')"
        background = "getComputedStyle(document.body).backgroundColor"
        before = self.page.evaluate(background)
        assert self.page.evaluate(scheme) == "default"
        self.page.click("label[title='Switch to dark mode']:visible")
        assert self.page.evaluate(scheme) == "slate"
        assert self.page.evaluate(background) != before
        for name in PICTURES:
            self.open(f"{name}.html")
            assert self.page.evaluate(scheme) == "slate", f"{name} is light again"
            self.picture(f"dark-{name}")

    def pictures_of(self):
        """Pages on a wide screen and on a narrow one."""
        for size, screen in (("narrow", NARROW), ("wide", WIDE)):
            self.page.set_viewport_size(screen)
            for name in PICTURES:
                self.open(f"{name}.html")
                self.picture(f"{size}-{name}")


def build(folder):
    """Build the site, with warnings as errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})


def look(site, pictures):
    """Every check; AssertionError where one fails."""
    from playwright.sync_api import sync_playwright

    address, server = served(site)
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as player:
        context = player.chromium.launch_persistent_context(
            profile, executable_path=chromium(), args=FLAGS, viewport=WIDE
        )
        try:
            check = Check(context, address, pictures)
            pages = check.every_page()
            print(f"{len(pages)} pages load, without sideways scrolling on a narrow screen")
            print(f"{check.questions(pages)} questions are answered where they should be")
            for name in ("tabs", "search", "pictures_of", "dark"):
                getattr(check, name)()
                print(f"{name}: as it should be")
            assert not check.errors, "\n".join(check.errors)
            print("no error of the console, no request to another host")
        finally:
            context.close()
            server.shutdown()


def main():
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of some pages")
    parser.add_argument("--site", type=Path, help="a site that is built already")
    options = parser.parse_args()
    if (what := missing()) is not None:
        sys.exit(f"The check needs {what}")
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = options.site or Path(folder, "site")
        if not options.site:
            build(site)
        look(site, options.screenshots)


if __name__ == "__main__":
    main()
