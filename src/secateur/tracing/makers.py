"""How models are built: as the user says, or as their library does.

Each library's function below takes a model and gives its `Maker`, or None if the model is not of that library. The
arguments are plain data, as the library itself writes them to disk: what they can say, a file can.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.distributed import plain_kind
from secateur.errors import TraceError
from secateur.state.patches import patched
from secateur.tracing.constructor import Maker


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
    named = next((p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    more = bound.arguments.pop(named, {})
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
    """timm's function for a model of a name."""

    name: str

    def __call__(self, **arguments: Any) -> Any:
        return sys.modules["timm"].create_model(self.name, **arguments)


def _timm(model: nn.Module) -> Maker | None:
    timm, config = sys.modules.get("timm"), getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, Mapping) else None
    if timm is None or not isinstance(name, str) or not timm.is_model(name):
        return None
    own = {key: vars(model)[key] for key in ("num_classes", "in_chans") if type(vars(model).get(key)) is int}
    return Maker(Created(name), own)


def with_fields(maker: Maker, model: nn.Module) -> Maker:
    """A maker with all numbers that its function takes, also those that it has by default: timm's."""
    if not isinstance(maker.function, Created):
        return maker
    given = {**_passed_on(maker, type(model)), **maker.arguments}
    while given:
        full = Maker(maker.function, given)
        try:
            full.build({})
        except TypeError as error:  # a keyword that the function for this name does not pass on
            names = [name for name in given if f"'{name}'" in str(error)]
            if not names:
                break
            given = {name: value for name, value in given.items() if name not in names}
        else:
            return full
    return Maker(maker.function, {})


def _passed_on(maker: Maker, kind: type) -> dict[str, Any]:
    """The numbers that timm passes to the class of a model, its defaults included."""
    given: list[dict[str, Any]] = []
    initialise = kind.__init__  # type: ignore[misc]

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is kind:
            bound = inspect.signature(initialise).bind(self, *args, **kwargs)
            bound.apply_defaults()
            given.append(bound.arguments)
        initialise(self, *args, **kwargs)

    with patched((kind, "__init__", noted)):
        maker.build({})
    return {name: value for name, value in (given or [{}])[0].items() if _has_numbers(value)}


def _has_numbers(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_numbers, value))
    return type(value) in (int, float)


_LIBRARIES: tuple[Callable[[nn.Module], Maker | None], ...] = (_transformers, _diffusers, _timm)

__all__ = ["Created", "check_make", "from_config", "maker_of", "with_fields"]
