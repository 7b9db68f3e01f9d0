"""What a compensation is to do and what it reached, as values: three recipes, which `compensation` carries out."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from secateur.arguments import FLAG, Rule, a_number, an_int, check_fields
from secateur.errors import CalibrationError

_STEPS = 10**6  # of a block, at most
JOINT = Rule(f"how many steps each block takes, from 0 on to {_STEPS}", an_int(0, _STEPS).holds)


class Compensation:
    """Changes what is left of a model so that its layers put out on the given batches what they did before the cut.

    A recipe, which is a value: what is solved for, and with which options. Those that a recipe has no use for stay as
    they are here, and it does not take them.
    """

    weights: ClassVar[bool] = False  # whether weights are solved for
    shifts: ClassVar[bool] = False  # whether biases are
    guarded: ClassVar[bool] = True  # whether all is taken back if the output is no nearer
    batches: Any
    ridge: float = 1e-3
    bias: bool = False
    statistics: bool = True
    joint: int = 0

    def __post_init__(self) -> None:
        positive = Rule("a positive number", a_number(above=0).holds)
        check_fields(self, CalibrationError, ridge=positive, joint=JOINT, bias=FLAG, statistics=FLAG)


@dataclass(frozen=True, eq=False)
class LeastSquares(Compensation):
    """Refit the remaining weights, so that they express what the removed ones did, as far as they can.

    >>> import secateur as sec, torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> batches = [torch.randn(64, 4) for _ in range(4)]
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> _ = sec.apply(net, plan, compensate=sec.LeastSquares(batches))
    >>> sec.outcome(net).after < sec.outcome(net).before
    True

    Layer by layer, in the order in which they run, every weight that is multiplied with data is solved for anew: its
    inputs are those of the cut model so far, its outputs should be those of the uncut model. Where the result is added
    to a residual stream, it also makes up for what that stream is off. `ridge`, a share of the inputs' mean square,
    holds weights near what they were; up to a thousand times as much, if that does better on batches that were held
    back: one in eight, which are not fitted to. A layer that does no better on these stays as it is. (Of fewer than
    four batches none is held back; two halves judge each other.) With `bias=True`, a layer without a bias gets one
    where positions that it reads are gone and no batch norm follows. Batch norms that do not follow a refitted layer
    get the mean and variance of the batches (`statistics=False`: they stay).

    `batches` are any iterable of examples, also a generator; of an endless one give a part, `sec.Data(batches,
    samples=8192)`. Batches go from layer to layer in turn, so ten times the data take ten times the time, but no more
    memory: that of one batch and of the second moments of one layer's inputs. What is kept of each batch in between
    goes into files in a temporary folder, if it is much. What a run uses more than once (a
    recurrence, experts) is fitted to the inputs that the uncut model gives it. `sec.outcome(model)` says afterwards
    what was reached, layer by layer, on the batches that were held back. If the model's outputs are no nearer to the
    uncut model's than without it, everything is taken back.

    With `joint=120`, the layers of each block (a module in a list, such as a residual block) are then fitted together,
    by so many steps of gradient descent towards what the block put out before the cut: no labels, no output of the
    model, one block at a time. That takes a few times as long and the memory of one block's inputs and outputs for all
    batches, of which there must be four, and makes up for what layers by themselves cannot.
    """

    batches: Any = field(repr=False)
    _: KW_ONLY
    ridge: float = 1e-3
    bias: bool = False
    statistics: bool = True
    joint: int = 0
    weights: ClassVar[bool] = True
    shifts: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Constants(Compensation):
    """Fold the mean of what is removed into the biases of what reads it.

    >>> import secateur as sec, torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    >>> batches = [torch.randn(64, 4)]
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> _ = sec.apply(net, plan, compensate=sec.Constants(batches))
    >>> net[2].weight.shape
    torch.Size([2, 4])

    As `LeastSquares`, but weights stay as they are.
    """

    batches: Any = field(repr=False)
    _: KW_ONLY
    bias: bool = False
    statistics: bool = True
    shifts: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Statistics(Compensation):
    """Give batch norms the mean and variance that the batches have in the cut model.

    >>> import secateur as sec, torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    >>> batches = [torch.randn(8, 3, 8, 8)]
    >>> for _ in range(50):
    ...     _ = net(batches[0])
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> _ = sec.apply(net, plan, compensate=sec.Statistics(batches))
    """

    batches: Any = field(repr=False)
    _: KW_ONLY
    guarded: ClassVar[bool] = False


@dataclass(frozen=True)
class LayerFit:
    """How far a layer's output is off on the data, as a share of its variance, before and after compensation."""

    name: str
    before: float
    after: float
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a compensation did: layer by layer, and to the model's output (mean squared error over mean square).

    >>> print(Outcome((LayerFit("fc", 0.25, 0.01),), before=0.2, after=0.008))
    layer  error before   after
    fc           0.2500  0.0100
    output: 0.2 → 0.008
    """

    layers: tuple[LayerFit, ...]
    before: float
    after: float
    notes: tuple[str, ...] = ()
    taken_back: bool = False
    held: int = 0  # batches that were not fitted and tell the output's error; a layer's is on all that were held back

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=5)
        lines = [f"{'layer':<{width}}  error before   after"]
        lines += [f"{a.name:<{width}}  {a.before:>12.4f}  {a.after:>6.4f}  {a.note}".rstrip() for a in self.layers]
        where = f" (on {self.held} batches that were not fitted)" if self.held else ""
        return "\n".join([*lines, f"output: {self.before:.4g} → {self.after:.4g}{where}", *self.notes])
