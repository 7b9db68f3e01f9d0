"""HTML in which text from outside is always escaped: only `tag` makes markup."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


_VOID = {"input", "link", "meta", "wbr"}


def tag(name: str, /, *children: str, **attributes: str | int | bool | None) -> Markup:
    """An element. Children that are plain text are escaped, and so are attributes.

    >>> tag("p", "a < b", tag("b", "!"), class_="note", data_axis=3)
    '<p class="note" data-axis="3">a &lt; b<b>!</b></p>'

    A True attribute stands alone, a False or None one is left out.
    """
    given = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        given.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    opening = f"<{name}{''.join(given)}>"
    return Markup(opening if name in _VOID else f"{opening}{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Children one after the other.

    >>> joined("<", tag("i", "x"))
    '&lt;<i>x</i>'
    """
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def dotted(name: str) -> Markup:
    """A name that may break into lines behind its dots.

    >>> dotted("layer1.0")
    'layer1.<wbr>0'
    """
    first, *rest = name.split(".")
    return joined(first, *(joined(".", tag("wbr"), part) for part in rest))


def data(value: Any) -> Markup:
    r"""JSON that can stand inside of a script element.

    >>> data({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
