"""What mkdocs calls while it builds the site: pages that are generated, and links that leave `docs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import site_figures
import site_links
import site_reference
import site_tables
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]

# Files of the repository that are pages of the site too, by their path.
BORROWED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "figures/measurements.md",
}

_pages: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Make the pages, and put them into the navigation."""
    _pages.clear()
    reference = site_reference.pages()
    _pages.update({f"reference/{name}.md": text for name, (_, text) in reference.items()})
    figures = site_figures.pages(ROOT)
    _pages.update({f"figures/{name}.md": text for name, (_, text) in figures.items()})
    for path, page in BORROWED.items():
        _pages[page] = (ROOT / path).read_text(encoding="utf-8")
    for section in config.nav:
        for name, made in (("Reference", reference), ("Figures", figures)):
            if name in section:
                folder = name.lower()
                section[name][:0] = [{title: f"{folder}/{page}.md"} for page, (title, _) in made.items()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated, and the pictures that pages of the repository show."""
    for page, text in _pages.items():
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.png")):
        files.append(File.generated(config, f"figures/results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files of the repository lead to their pages, or to the repository."""
    source = page.file.src_uri
    borrowed = {made: path for path, made in BORROWED.items()}
    place = borrowed.get(source, f"docs/{source}")
    pages = dict(BORROWED)
    if ROOT / place in site_tables.texts(ROOT):  # what its figures come from has pages here
        site_tables.require_current(ROOT / place, ROOT)
        results = (ROOT / "benchmarks/results").glob("*.json")
        pages |= {f"benchmarks/results/{path.name}": f"figures/{path.stem}.md" for path in results}
    return site_links.resolved(markdown, source, place, ROOT, pages)


def on_post_build(config: Any) -> None:
    """Look at what was made: no page may load anything from another host."""
    site_links.require_own_host(Path(config.site_dir))
