"""Links of pages: between pages of the site, and to files of the repository that are none."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

REPOSITORY = "https://github.com/isograd/isograd"
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class BrokenLinkError(ValueError):
    """A link to a file that the repository does not have."""


def resolved(markdown: str, source: str, place: str, root: Path, pages: Mapping[str, str]) -> str:
    """A page's text with links that lead somewhere from the site.

    source: the page in the site. place: where its text stands in the repository, which its links are relative to.
    pages: files of the repository outside `docs/` that are pages. Code blocks stay as they are.
    """

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if path == "docs/README.md":
            page: str | None = "index.md"
        elif path in pages:
            page = pages[path]
        elif path.startswith("docs/"):
            page = path.removeprefix("docs/")  # mkdocs knows whether it is there
        elif text.startswith("!") and path.startswith("benchmarks/results/"):
            page = f"figures/results/{posixpath.basename(path)}"
        else:
            page = None
        if page is not None:
            return f"{text}{posixpath.relpath(page, posixpath.dirname(source) or '.')}{anchor})"
        if not (root / path).exists():
            raise BrokenLinkError(f"{place} has a link to {target}; the repository has no {path}")
        kind = "tree" if (root / path).is_dir() else "blob"
        return f"{text}{REPOSITORY}/{kind}/main/{path}{anchor})"

    parts = re.split(r"(?ms)(^```.*?^```$)", markdown)
    return "".join([part if part.startswith("```") else _LINK.sub(link, part) for part in parts])


class _Loads(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses of scripts, styles and pictures."""
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        if (address := given.get(_LOADS.get(tag, ""))) is not None:
            self.found.append(address)


def require_own_host(folder: Path) -> None:
    """Raise BrokenLinkError where a page loads something from another host."""
    for page in sorted(folder.rglob("*.html")):
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        for address in loads.found:
            if address.startswith(("http:", "https:", "//")):
                raise BrokenLinkError(
                    f"{page.relative_to(folder)} loads {address}; pages load from their own host only"
                )
