"""Tensors made in `forward`. Where all elements are alike, a dimension can follow a cut; otherwise it is fixed."""

from typing import Any

from torch import Tensor

from secateur.axes import Atom
from secateur.compat import aten
from secateur.ops.record import named, op
from secateur.ops.value import Call, Value, layouts_of
from secateur.ops.view import shape_given
from secateur.sizes.explain import Explainer

# Memory as it is, which does not count before it is written to.
EMPTY = {
    *named("empty.memory_format empty_strided.default empty_like.default new_empty.default new_empty_strided.default"),
}
# A constant of the model's code that becomes a tensor of the run: a new one, although it shares its memory.
LIFTED = aten.lift_fresh.default
_ZERO = {*named("zeros.default new_zeros.default _efficientzerotensor.default"), *(EMPTY - {aten.empty_like.default})}


@op(
    *_ZERO,
    "ones.default full.default rand.default randn.default randint.default randint.low new_ones.default "
    "rand.generator randn.generator randint.generator randint.low_generator new_full.default scalar_tensor.default",
    creates=True,
    called="scalar_tensor",
)
def alike(call: Call, *_: Any, **__: Any) -> Value:
    """Every element is alike (or drawn alike), wherever it is."""
    return Value([call.fresh(n) for n in call.shape], call.op in _ZERO, alike=True)


@alike.settled
def _(op: Any, *args: Any, **kwargs: Any) -> Tensor:
    """One draw for all elements."""
    one: Tensor = op(*args[:-1], [], **kwargs)
    return one.expand(args[-1]).clone()


@alike.sizes("zeros", "_efficientzerotensor", "ones", "empty", "rand", "randn", "full", "empty_strided")
def _(explain: Explainer, out: Any, size: Any, *_: Any, **__: Any) -> None:
    explain.expect_all(size, layouts_of(out))


@alike.sizes("randint")
def _(explain: Explainer, out: Any, *args: Any, **__: Any) -> None:
    """The sizes come after the bounds, of which the lower may be left out."""
    explain.expect_all(args[-1], layouts_of(out))


alike.sizes("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")(shape_given)


@op(
    "arange.default arange.start arange.start_step linspace.default logspace.default eye.default eye.m "
    "randperm.default randperm.generator tril_indices.default triu_indices.default hann_window.default",
    creates=True,
)
def counted(call: Call, *_: Any, **__: Any) -> Value:
    """Each element depends on its position, so positions cannot go."""
    reason = call.reason("each element depends on its position")
    return Value([Atom(n, reason) for n in call.shape], False)


@counted.sizes("arange", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices", "hann_window")
def _(explain: Explainer, out: Any, *args: Any, **kwargs: Any) -> None:
    """Contents depend on positions: what these numbers count must stay."""
    for number in (*args, *kwargs.values()):
        explain.pin(number, "numbers positions one by one")


@op(aten.one_hot.default, called="one_hot")
def one_hot(call: Call, x: Value, classes: int = -1) -> Value:
    """A new last dimension of classes."""
    return Value([*x.dims, call.fixed(call.shape[-1], "classes")], False)
