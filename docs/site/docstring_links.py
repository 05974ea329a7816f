"""Turns roles such as :meth:`edge_spec.Engine.stream` in docstrings into links, where the page has such an entry."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|func|meth):`~?([\w.]+)`")


class DocstringLinks(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda match: _link(match[1], obj), obj.docstring.value)


def _link(name: str, obj: griffe.Object) -> str:
    """A link to ``name`` as ``obj`` sees it; where the site has no such entry, only its text."""
    path = name
    if not name.startswith("edge_spec."):
        scope: griffe.Object | None = obj
        while scope is not None and name.split(".")[0] not in scope.members:
            scope = scope.parent
        if scope is not None:
            # By the name that is public, which is where the page has it.
            path = f"edge_spec.{scope.name}.{name}" if scope.is_class else f"edge_spec.{name}"
    shown = name.removeprefix("edge_spec.")
    return f'<autoref identifier="{escape(path)}" optional><code>{escape(shown)}</code></autoref>'
