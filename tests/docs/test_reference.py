"""The reference has every public name and every command, and every page is in the navigation."""

from __future__ import annotations

import pytest

import kvferry
from tests.docs.blocks import PAGES, REPOSITORY

API = (REPOSITORY / "docs/reference/api.md").read_text().split()
NAVIGATION = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


@pytest.mark.parametrize("name", sorted(kvferry._HOMES))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    home = kvferry._HOMES[name]
    assert f"{home}.{name}" in API or home in API  # a module that is shown as a whole


@pytest.mark.parametrize("page", [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")])
def test_every_page_is_in_the_navigation(page: str) -> None:
    assert f"{page}\n" in NAVIGATION
