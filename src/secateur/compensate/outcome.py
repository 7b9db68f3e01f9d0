"""What a compensation reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """How far a layer's output is off on the data, as a share of its variance, before and after compensation."""

    name: str
    before: float
    after: float
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a compensation did: layer by layer, and to the model's output (mean squared error over mean square)."""

    layers: tuple[Layer, ...]
    before: float
    after: float
    notes: tuple[str, ...] = ()
    taken_back: bool = False

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=5)
        lines = [f"{'layer':<{width}}  error before   after"]
        lines += [f"{a.name:<{width}}  {a.before:>12.4f}  {a.after:>6.4f}  {a.note}".rstrip() for a in self.layers]
        return "\n".join([*lines, f"output: {self.before:.4g} → {self.after:.4g}", *self.notes])
