"""What the documentation shows: programs that Python reads, and links that lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import edge_spec

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_ANSWER = re.compile(r"^````\n.*?^````$", re.MULTILINE | re.DOTALL)  # a model's, which may hold anything
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_in_the_documentation_can_be_read(page: Path) -> None:
    for block in _BLOCK.findall(_ANSWER.sub("", page.read_text("utf-8"))):
        compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_on_the_api_page() -> None:
    documented = set(re.findall(r"^::: edge_spec\.(?:errors\.)?(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    errors = {name for name in edge_spec.__all__ if name.endswith("Error")}  # the page shows all of that module
    assert set(edge_spec.__all__) - errors <= documented
