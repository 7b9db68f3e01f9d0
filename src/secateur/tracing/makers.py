"""How models are built: as the user says, or as their library does.

Each library's function below takes a model and gives its `Maker`, or None if the model is not of that library. The
arguments are plain data, as the library itself writes them to disk: what they can say, a file can.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from secateur.distributed import plain_kind
from secateur.errors import TraceError
from secateur.state.patches import patched
from secateur.tracing.constructor import Maker
from secateur.tracing.fields import fitted, makes


def check_make(make: object) -> None:
    """Refuse what does not say how a model is built."""
    if make is not None and not isinstance(make, functools.partial):
        raise TraceError(
            f"make= is a callable with its arguments, functools.partial(Net, width=64), not {make!r:.80}: "
            "the numbers among the arguments are what a cut may change"
        )


def maker_of(model: nn.Module, make: functools.partial[Any] | None = None) -> Maker | None:
    """How a model is built: as `make` says, or as its library does; None where neither is known.

    >>> maker_of(nn.Linear(4, 8), functools.partial(nn.Linear, 4, out_features=8)).arguments
    {'in_features': 4, 'out_features': 8}
    """
    if make is None:
        return next((found for find in _LIBRARIES if (found := find(model)) is not None), None)
    try:
        bound = inspect.signature(make.func).bind_partial(*make.args, **make.keywords)
    except (TypeError, ValueError) as error:
        raise TraceError(f"make= cannot be called with these arguments: {error}") from None
    rest = [p.name for p in bound.signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
    if any(name in bound.arguments for name in rest):
        raise TraceError(
            "make= takes arguments that have names: pass them by keyword, functools.partial(Net, width=64)"
        )
    more = bound.arguments.pop(_rest(bound), {})
    given = {**bound.arguments, **more}
    if make.func is getattr(sys.modules.get("timm"), "create_model", None) and isinstance(given["model_name"], str):
        return Maker(Created(given.pop("model_name")), {k: v for k, v in given.items() if k != "pretrained"})
    return Maker(make.func, given)


def from_config(cls: Any, **config: Any) -> Any:
    """A model of Transformers from the contents of its config.json."""
    return cls(cls.config_class.from_dict(config))


def _transformers(model: nn.Module) -> Maker | None:
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    for what in ("attn_implementation", "experts_implementation"):  # which config.json leaves out
        if isinstance(used := getattr(model.config, f"_{what}", None), str):
            config[what] = used
    return Maker(functools.partial(from_config, plain_kind(type(model))), config)


def _diffusers(model: nn.Module) -> Maker | None:
    base = getattr(sys.modules.get("diffusers"), "ModelMixin", None)
    if base is None or not isinstance(model, base):
        return None
    taken = inspect.signature(type(model).__init__).parameters
    return Maker(type(model), {name: value for name, value in model.config.items() if name in taken})


@dataclass(frozen=True)
class Created:
    """timm's function for a model of a name; or (`inside`) the model's class, as that function calls it.

    Many of timm's functions do not take the arguments that they pass to the class: `convmixer_768_32(dim=512)` fails.
    """

    name: str
    inside: type[nn.Module] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)  # to the function, where arguments are those of the class

    def __call__(self, **arguments: Any) -> Any:
        create = sys.modules["timm"].create_model
        if self.inside is None:
            return create(self.name, **arguments)
        with _called(self.inside, partial(_put, arguments=arguments)):
            return create(self.name, **self.given)


@contextmanager
def _called(kind: type[nn.Module], see: Callable[[inspect.BoundArguments], None]) -> Iterator[None]:
    """`see` what a class is called with, defaults included, or change it; what its subclasses are is their own."""
    initialise = kind.__init__

    def seen(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(initialise).bind(self, *args, **kwargs)
        if type(self) is kind:
            bound.apply_defaults()
            see(bound)
        initialise(*bound.args, **bound.kwargs)

    with patched((kind, "__init__", seen)):
        yield


def _rest(bound: inspect.BoundArguments) -> str:
    """The name of the argument that takes all keywords that have none."""
    return next((p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")


def _put(bound: inspect.BoundArguments, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        (bound.arguments if name in bound.signature.parameters else bound.arguments[_rest(bound)])[name] = value


def _timm(model: nn.Module) -> Maker | None:
    timm, config = sys.modules.get("timm"), getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, Mapping) else None
    if timm is None or not isinstance(name, str) or not timm.is_model(name):
        return None
    own = {key: vars(model)[key] for key in ("num_classes", "in_chans") if type(vars(model).get(key)) is int}
    maker = Maker(Created(name), own)
    try:
        if makes(maker, model):
            return maker
        whole = with_fields(maker, model)  # it was created with arguments of its own
    except Exception:  # any code of the library's may run here
        return maker
    found = fitted(whole, model)
    if found is whole or found.function != maker.function:
        return maker if found is whole else found
    return Maker(maker.function, {k: v for k, v in found.arguments.items() if k in own or v != whole.arguments[k]})


def with_fields(maker: Maker, model: nn.Module) -> Maker:
    """A maker with all numbers that its function takes, also those that it has by default: timm's.

    Where that function does not take all that it passes to the model's class, these are the arguments of the class.
    """
    if not isinstance(maker.function, Created):
        return maker
    kind = type(model)
    passed = _passed_on(maker, kind)
    full = Maker(maker.function, {**passed, **maker.arguments})
    try:
        full.build({})
    except TypeError:  # a keyword that the function for this name does not pass on
        return Maker(Created(maker.function.name, kind, maker.arguments), passed)
    return full


def _passed_on(maker: Maker, kind: type[nn.Module]) -> dict[str, Any]:
    """What timm passes to the class of a model that is made of numbers, its defaults included."""
    found: dict[str, Any] = {}

    def see(bound: inspect.BoundArguments) -> None:
        named = {**bound.arguments, **bound.arguments.get(_rest(bound), {})}
        for name in [name for name in named if name not in (_rest(bound), *found)][1:]:  # without the model itself
            one = Maker(kind, {name: named[name]})
            if one.fields():
                found.update(one.changed(lambda _place, value: value))  # a copy: the class may change its own

    with _called(kind, see):
        maker.build({})
    return found


_LIBRARIES: tuple[Callable[[nn.Module], Maker | None], ...] = (_transformers, _diffusers, _timm)

__all__ = ["Created", "check_make", "from_config", "maker_of", "with_fields"]
