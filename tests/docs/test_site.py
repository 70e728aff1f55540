"""What the site is generated from: names, signatures, tables, figures and links. `.ci/run` builds it."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlx.core")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site():
    """The modules that make the site."""
    sys.path.insert(0, str(ROOT / "tools/site"))
    try:
        yield lambda name: importlib.import_module(f"site_{name}")
    finally:
        sys.path.remove(str(ROOT / "tools/site"))


def test_every_public_name_is_in_the_reference(site):
    reference = site("reference")
    named = {(e.module, e.name) for e in reference.entries()}
    own = {e.value for e in reference.entries() if e.module == "isograd" and callable(e.value)}
    for module in reference.MODULES:
        values = importlib.import_module(module)
        for name in values.__all__:
            value = getattr(values, name)
            handed_on = module == "isograd.tape" and value in own
            assert (module, name) in named or handed_on or isinstance(value, type(sys)), f"{module}.{name}"
    assert not [e.path for e in reference.entries() if e.page == "more"], "names without a page of their own"


def test_signatures_are_those_that_are_called(site):
    import isograd
    import isograd.torch as igt

    signature = site("reference").signature
    assert signature("softmax", isograd.softmax) == "softmax(x, axis: int = -1, *, out=None)"
    assert signature("gather", igt.gather).splitlines()[:3] == ["gather(", "    input: Tensor,", "    dim: int,"]
    assert "shape: tuple[int, ...]" in signature("SoftmaxDescriptor", isograd.SoftmaxDescriptor)
    assert signature("StepError", isograd.StepError).startswith("class StepError(")


def test_arguments_of_a_docstring_become_a_list(site):
    def function(x, out):
        """Twice `x`, x < 3.

        x: an array, any
        shape. out: where the result goes.
        y: the result.

            code: kept

        Raises ValueError for a wrong x: see `docs/arithmetic.md`.
        """

    text = site("reference").docstring(function, {})
    assert "x &lt; 3" in text
    assert "- **`x`**: an array, any shape.\n- **`out`**: where the result goes.\n- **`y`**: the result." in text
    assert "    code: kept" in text
    assert "wrong x: see [arithmetic.md](../arithmetic.md)." in text


def test_an_operations_table_says_what_its_declaration_does(site):
    operations = site("operations")
    from isograd.core import registry

    text = operations._table("kl_div", [e for e in registry.kernels() if e.operation == "kl_div"]).text
    assert "`kl_div_backward`" in text
    assert "`reduction`: reduction, one of `mean`, `batchmean`, `sum`, `none`" in text
    assert "| cpu | numba | float16, bfloat16, float32, float64 | run, batch, order, machine |" in text
    assert "|log p|".replace("|", "&#124;") in text


@pytest.mark.parametrize("page", ["README.md", "docs/reproducible_training.md"])
def test_the_digest_of_the_language_model_is_the_published_one(page):
    from isograd.cli import check

    published = check.published()["language_model"]["weights"]["float32"]["4"]
    assert re.findall(r"`([0-9a-f]{8})…([0-9a-f]{8})`", (ROOT / page).read_text()) == [(published[:8], published[-8:])]


def test_links_of_the_readme_lead_somewhere():
    for text in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        source = ROOT / text
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", source.read_text()):
            if not link.startswith("http"):
                assert (source.parent / link).exists(), f"{text}: {link}"


def test_links_lead_somewhere(site):
    links = site("links")
    pages = {"CONTRIBUTING.md": "contributing.md"}

    def resolved(text, source="guides/a.md"):
        return links.resolved(text, source, f"docs/{source}", ROOT, pages)

    assert resolved("[a](../../CONTRIBUTING.md#x)") == "[a](../contributing.md#x)"
    assert resolved("[a](../README.md)") == "[a](../index.md)"
    assert resolved("[a](../../src/isograd/public.py)").endswith("/blob/main/src/isograd/public.py)")
    assert resolved("[a](https://example.org/x.md)") == "[a](https://example.org/x.md)"
    assert resolved("```\n[a](no.py)\n```") == "```\n[a](no.py)\n```"
    with pytest.raises(links.BrokenLinkError, match=r"no src/isograd/missing.py"):
        resolved("[a](../../src/isograd/missing.py)")


def test_a_page_that_loads_from_another_host_is_found(site, tmp_path):
    links = site("links")
    page = tmp_path / "page.html"
    page.write_text('<link rel="canonical" href="https://a.org"><script src="a.js"></script><a href="https://b.org">')
    links.require_own_host(tmp_path)
    page.write_text('<script src="https://c.org/a.js"></script>')
    with pytest.raises(links.BrokenLinkError, match=r"page.html loads https://c.org/a.js"):
        links.require_own_host(tmp_path)
