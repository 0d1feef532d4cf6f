"""HTML that cannot be broken by what it shows: text is escaped unless it is `Markup`, which is made here."""

from __future__ import annotations

import html
from collections.abc import Iterable

from controller.text import safe_line


class Markup(str):
    """Finished HTML."""

    __slots__ = ()


Child = str | Markup | Iterable["Child"] | None
_EMPTY = ("meta", "br", "line", "rect", "circle", "polyline", "path", "polygon")


def text(value: str) -> Markup:
    """One line of anybody's text."""
    return Markup(html.escape(safe_line(value)))


def lines(values: Iterable[str]) -> Markup:
    """Lines of anybody's text, for a `pre`."""
    return Markup("\n".join(html.escape(safe_line(value)) for value in values))


def el(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """An element; attributes that are None are left out, `_` in their names is a dash, a last one goes."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_written(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{given}>" if name in ("meta", "br") else f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Child) -> Markup:
    """Children in a row; plain text is escaped."""
    if children is None:
        return Markup()
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return text(children)
    return Markup("".join(join(child) for child in children))


def _written(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
