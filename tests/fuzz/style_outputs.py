"""Ways in which models give their answer: `answer(logits, hidden)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor


@dataclass
class Answer:
    logits: Tensor
    parts: dict[str, list[Tensor]]


class Pair(NamedTuple):
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Holder:
    """A plain object."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


ANSWERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, h: y,
    "tuple": lambda y, h: (y, [h.mean(-1)], None),
    "named tuple": lambda y, h: Pair(y, (h,)),
    "dict": lambda y, h: {"out": y, "more": {"width": h.shape[-1], "all": [y * 2]}},
    "dataclass": lambda y, h: Answer(y, {"hidden": [h]}),
    "object": lambda y, h: Holder(y=y, h=h),
    "objects in an object": lambda y, h: Holder(y=y, inner=Holder(h=h)),
    "namespace of objects": lambda y, h: SimpleNamespace(main=Holder(y=y), rest=[Holder(h=h)]),
}
