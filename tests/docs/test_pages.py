"""The pages themselves: short, linked, with blocks of known kinds, and names of what is there."""

import pytest

from tests.docs.pages import LANGUAGES, PAGES, ROOT, anchors, blocks, links, missing_links

INDEX = ROOT / "docs" / "index.md"
IDS = [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    assert missing_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_blocks_say_what_they_are(page):
    assert page.read_text().count("\n```") == 2 * len(blocks(page.read_text()))
    assert {block.language for block in blocks(page.read_text())} <= set(LANGUAGES)


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pages_are_short(page):
    lines = page.read_text().splitlines()
    assert len(lines) <= 250
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_index_and_the_readme_lead_to_every_page():
    pages = {path.name for path in PAGES[1:]}
    assert {link.partition("#")[0] for link in links(INDEX.read_text())} >= pages - {"index.md"}
    in_readme = {link.partition("#")[0] for link in links((ROOT / "README.md").read_text())}
    assert in_readme >= {f"docs/{name}" for name in pages - {"index.md"}}


def test_pictures_are_small():
    assert all(path.stat().st_size < 200_000 for path in (ROOT / "docs/images").iterdir())


def test_a_broken_link_is_found():
    text = "# A b, `c`: d\n[a](search.md#names) [b](nowhere.md) [c](search.md#nowhere) [d](https://example.org)"
    assert anchors(text) == {"a-b-c-d"}
    assert anchors('<a id="kv-cache"></a>**KV cache**: kept') == {"kv-cache"}
    assert missing_links(INDEX, text) == ["nowhere.md", "search.md#nowhere"]
