"""Biases that a model's class does not give its layers: added where something constant has to go."""

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from secateur.compat import Convolution, TransposedConvolution
from secateur.errors import ApplyError
from secateur.planning.plans import Plan
from secateur.tracing import unwrap

_ADDED = "_secateur_added_bias"
_Layer = nn.Linear | Convolution


def ensure_bias(model: nn.Module, name: str) -> nn.Parameter:
    """The bias of a linear or convolution layer; one of zeros is added where the layer was built without.

    >>> net = nn.Sequential(nn.Linear(2, 3, bias=False))
    >>> ensure_bias(net, "0")
    Parameter containing:
    tensor([0., 0., 0.], requires_grad=True)
    >>> added_biases(net)
    ('0',)

    The layer remembers that it was added, so that `save` and `load` do.
    """
    layer = _layer(unwrap(model, sharded=True), name)
    if "bias" not in layer._parameters:
        raise ApplyError(f"the bias of {name} is computed, not held; remove its parametrization first")
    bias = layer._parameters["bias"]
    if bias is None:
        weight = layer.weight
        bias = nn.Parameter(weight.new_zeros(_outputs(layer)), requires_grad=weight.requires_grad)
        layer._parameters["bias"] = bias
        layer.__dict__[_ADDED] = True
    return bias


def added_biases(model: nn.Module) -> tuple[str, ...]:
    """The names of the layers that `ensure_bias` gave a bias."""
    modules = unwrap(model, sharded=True).named_modules()
    return tuple(
        name for name, m in modules if m.__dict__.get(_ADDED) is True and m._parameters.get("bias") is not None
    )


def add_biases(model: nn.Module, names: Collection[str]) -> None:
    """Give each of these layers a bias of zeros; refused where one has a bias."""
    for name in names:
        if _layer(model, name)._parameters.get("bias", model) is not None:
            raise ApplyError(f"a bias is to be added to {name}, which has one")
        ensure_bias(model, name)


def check_biases(model: nn.Module, names: Collection[str]) -> None:
    """Refuse an added bias that is not as long as its layer has outputs."""
    for name in names:
        layer = _layer(model, name)
        outputs = _outputs(layer)
        if layer.bias is None or tuple(layer.bias.shape) != (outputs,):
            raise ApplyError(f"the bias added to {name} does not have the {outputs} elements that the layer puts out")


def with_added(plan: Plan, model: nn.Module) -> Plan:
    """A plan that leads to a model from its full size, as if the biases added since had been there from the start.

    What of such a bias stays is what stays of the outputs of its layer's weight.
    """
    kept, shapes = dict(plan.kept), dict(plan.shapes)
    for name in added_biases(model):
        weight, bias = (f"{name}.{key}".lstrip(".") for key in ("weight", "bias"))
        kept.pop(bias, None)
        shapes.pop(bias, None)
        layer = _layer(unwrap(model, sharded=True), name)
        dim, groups = _output_dim(layer)
        rows = kept.get(weight, {}).get(dim)
        if rows is None:
            continue
        if groups != 1:
            raise ApplyError(
                f"{name} is a transposed convolution in groups; a bias added to it cannot be kept with a cut of its "
                "outputs. Build it with bias=True"
            )
        kept[bias], shapes[bias] = {0: rows}, (shapes[weight][dim],)
    return replace(plan, kept=kept, shapes=shapes)


def _layer(model: nn.Module, name: str) -> _Layer:
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, _Layer):
        what = "no module" if module is None else f"a {type(module).__name__}"
        raise ApplyError(f"{name!r:.80} is {what} in {type(model).__name__}; only linear and convolution layers")
    return module


def _output_dim(layer: _Layer) -> tuple[int, int]:
    """The dimension of the weight that is the layer's outputs, and how often it counts."""
    if isinstance(layer, TransposedConvolution):
        return 1, layer.groups
    return 0, 1


def _outputs(layer: _Layer) -> int:
    dim, times = _output_dim(layer)
    return layer.weight.shape[dim] * times


__all__ = ["add_biases", "added_biases", "check_biases", "ensure_bias", "with_added"]
