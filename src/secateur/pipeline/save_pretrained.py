"""`save_pretrained` of a cut model: where the configuration alone cannot say what is left, the plan goes beside it.

From the first cut of a model of Transformers or diffusers on, their `save_pretrained` asks whether the model was cut.
What it writes then is an ordinary checkpoint if the plan was loadable. Any other would be opened at another size, in
part or not at all. So the plan is put beside the weights, and the configuration is marked with an entry that
`from_pretrained` cannot read past: its message tells how to open the folder.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from secateur.errors import FileError, SecateurWarning
from secateur.pipeline.rebuild import origin_in
from secateur.planning.plans import Plan
from secateur.surgery.bias import added_biases, with_added

PLAN = "secateur.json"
FROZEN = "secateur_frozen"  # an entry of the configuration: the parameters that require no gradient
_NAME = "save_pretrained"
_HOW = "this model was cut with Secateur: open the folder with secateur.load(folder)"
# An entry that each library refuses in its own words, which quote it.
_MARKS: dict[str, Mapping[str, Any]] = {
    "transformers": {"transformers_weights": _HOW},  # the name of a weights file, which is none
    "diffusers": {"quantization_config": {"quant_method": _HOW}},
}
_BASES = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}


def marked(config: Mapping[str, Any], library: str) -> dict[str, Any]:
    """A configuration that `from_pretrained` refuses, and says why."""
    return {**config, **_MARKS[library]}


def is_marked(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of a folder that `secateur.load` opens.

    >>> is_marked(marked({"hidden_size": 8}, "transformers")), is_marked({"hidden_size": 8})
    (True, False)
    """
    return any(all(config.get(key) == value for key, value in mark.items()) for mark in _MARKS.values())


class Watched:
    """What a cut model holds so that its `save_pretrained` is watched, also where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _watched, (type(self),)


def _watched(kind: type[Watched]) -> Watched:
    for library, base in _BASES.items():
        if (found := getattr(sys.modules.get(library), base, None)) is not None:
            _wrap(found, library)
    return kind()


def watch(model: nn.Module) -> None:
    """See to it that `save_pretrained` asks whether a model was cut. Models that were not are none of its business."""
    for library, base in _BASES.items():
        found = getattr(sys.modules.get(library), base, None)
        if found is not None and isinstance(model, found):
            for kind in type(model).__mro__:
                if issubclass(kind, found) and _NAME in vars(kind):
                    _wrap(kind, library)
            model.__dict__["_secateur_watched"] = Watched()


def _wrap(kind: Any, library: str) -> None:
    own = vars(kind)[_NAME]
    if getattr(own, "secateur", False):
        return

    @functools.wraps(own)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        plan = self.__dict__.get("_secateur_plan")
        adapters = bool(getattr(self, "_hf_peft_config_loaded", False))  # then only these are written
        if not isinstance(plan, Plan) or adapters or (plan.loadable and not added_biases(self)):
            return own(self, save_directory, *args, **kwargs)
        if kwargs.get("push_to_hub"):
            raise FileError(f"{save_directory}: save the cut model first, then upload the folder; push_to_hub=False")
        return _save(self, plan, library, own, Path(save_directory), args, kwargs)

    save_pretrained.secateur = True  # type: ignore[attr-defined]
    setattr(kind, _NAME, save_pretrained)


def _save(model: nn.Module, plan: Plan, library: str, own: Any, folder: Path, args: Any, kwargs: Any) -> Any:
    if plan.factored:
        raise FileError(
            f"{folder}: {plan.factored[0]} is a product of two layers, which {library} has no name for; use "
            "secateur.save(model, path)"
        )
    plan = replace(with_added(plan, model), example=None, others=())
    found = origin_in(model, plan)
    if found.origin is None:
        warnings.warn(
            f"{folder}: opening it will take a model of full size, secateur.load(folder, model): {found.why}",
            SecateurWarning,
            stacklevel=4,
        )
    if found.tables:
        state = kwargs.get("state_dict")
        kwargs = {**kwargs, "state_dict": {**(model.state_dict() if state is None else state), **found.tables}}
    if library == "transformers":
        kwargs = {"save_original_format": False, **kwargs}
    writes = kwargs.get("is_main_process", args[0] if args else True)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(replace(plan, origin=found.origin).to_json(), "utf-8")
    done = own(model, folder, *args, **kwargs)
    if writes:
        config = folder / "config.json"
        told = {**json.loads(config.read_text("utf-8")), FROZEN: frozen_in(model)}
        config.write_text(json.dumps(marked(told, library), indent=2) + "\n", "utf-8")
    return done


def frozen_in(model: nn.Module) -> tuple[str, ...]:
    """The names of parameters that require no gradient."""
    return tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


__all__ = ["FROZEN", "PLAN", "frozen_in", "is_marked", "marked", "watch"]
