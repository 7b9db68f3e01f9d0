"""Docstrings of this library begin with doctests, without a heading; here they become code on the page."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^(?!$).*\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around every doctest of a docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            fenced = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = fenced
