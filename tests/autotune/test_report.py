"""The report opens by itself: well-formed, nothing from elsewhere, a picture for every search."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from pagec.autotune.database import Database
from pagec.autotune.report import Section, page, sections_of
from pagec.compiler.backends.targets import load_cuda_target


@pytest.fixture(scope="module")
def sections() -> list[Section]:
    target, database = load_cuda_target("h100"), Database("h100", "cuda")
    found = [*sections_of(database, "attention_prefill", target)]
    return found[:3] + [*sections_of(database, "attention_decode", target)][:2]


@pytest.fixture(scope="module")
def text(sections: list[Section]) -> str:
    return page("Tuned <kernels>", sections)


class Tags(HTMLParser):
    """Checks that tags nest; collects attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_tags_nest_and_links_lead_somewhere(text: str) -> None:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    ids = {attrs["id"] for _, attrs in tags.seen if "id" in attrs}
    links = [attrs["href"] for _, attrs in tags.seen if "href" in attrs]
    assert links
    assert all(link and link.startswith("#") and link[1:] in ids for link in links)


def test_nothing_comes_from_elsewhere(text: str) -> None:
    assert "://" not in text
    assert not re.search(r"\b(src|srcset|action|@import|url)\b *[=(]", text)
    assert "<link" not in text


def test_every_search_is_drawn(text: str, sections: list[Section]) -> None:
    pictures = re.findall(r"<svg.*?</svg>", text)
    assert len(pictures) == 2 * len(sections)
    for picture in pictures:
        ElementTree.fromstring(picture)
    for one, scatter in zip(sections, pictures[::2], strict=True):
        assert one.title in scatter
        assert 'class="roof"' in scatter
        assert 'class="chosen"' in scatter
        places = [float(y) for y in re.findall(r'<circle [^>]*cy="([\d.]+)"', scatter)]
        roof = float(re.findall(r'class="roof"[^>]*y1="([\d.]+)"', scatter)[0])
        assert max(places) <= roof + 0.1  # no point is faster than the roofline


def test_text_is_escaped(text: str) -> None:
    assert "Tuned &lt;kernels&gt;" in text
    assert "<kernels>" not in text
