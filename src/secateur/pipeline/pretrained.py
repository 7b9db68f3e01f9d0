"""`save_pretrained` of a cut model: where the configuration alone cannot say what is left, the plan goes beside it.

A cut model of Transformers or diffusers has a `save_pretrained` of its own, which calls that of its class. What that
writes is an ordinary checkpoint if the plan was loadable. Any other would be opened at another size, in part or not at
all. So the plan is put beside the weights, and the configuration is marked with an entry that `from_pretrained` cannot
read past: its message tells how to open the folder.
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
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
HOOK = "save_pretrained"
_HOW = "this model was cut with Secateur: open the folder with secateur.load(folder)"
# An entry that each library refuses in its own words, which quote it.
_MARKS: dict[str, Mapping[str, Any]] = {
    "transformers": {"transformers_weights": _HOW},  # the name of a weights file, which is none
    "diffusers": {"quantization_config": {"quant_method": _HOW}},
}
_BASES = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}


def library_of(model: nn.Module) -> str | None:
    """The library whose `save_pretrained` a model has."""
    for library, base in _BASES.items():
        kind = getattr(sys.modules.get(library), base, None)
        if kind is not None and isinstance(model, kind):
            return library
    return None


def marked(config: Mapping[str, Any], library: str) -> dict[str, Any]:
    """A configuration that `from_pretrained` refuses, and says why."""
    return {**config, **_MARKS[library]}


def is_marked(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of a folder that `secateur.load` opens.

    >>> is_marked(marked({"hidden_size": 8}, "transformers")), is_marked({"hidden_size": 8})
    (True, False)
    """
    return any(all(config.get(key) == value for key, value in mark.items()) for mark in _MARKS.values())


class SavePretrained:
    """`save_pretrained` of one cut model; a copy of the model has a copy of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # a model that holds itself would stay in memory longer than it is used

    def __deepcopy__(self, memo: dict[int, Any]) -> SavePretrained:
        model = self._model()
        return SavePretrained(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePretrained, (self._model(),)

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        own = getattr(type(model), HOOK)
        plan = model.__dict__.get("_secateur_plan")
        library = library_of(model)
        adapters = bool(getattr(model, "_hf_peft_config_loaded", False))  # then only these are written
        if not isinstance(plan, Plan) or library is None or adapters or (plan.loadable and not added_biases(model)):
            return own(model, save_directory, *args, **kwargs)
        if kwargs.get("push_to_hub"):
            raise FileError(f"{save_directory}: save the cut model first, then upload the folder; push_to_hub=False")
        return _save(model, plan, library, own, Path(save_directory), args, kwargs)


def _save(model: nn.Module, plan: Plan, library: str, own: Any, folder: Path, args: Any, kwargs: Any) -> Any:
    plan = replace(with_added(plan, model), example=None, others=())
    found = origin_in(model, plan)
    if found.origin is None:
        warnings.warn(
            f"{folder}: opening it will take a model of full size, secateur.load(folder, model): {found.why}",
            SecateurWarning,
            stacklevel=3,
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
        text = json.dumps(marked(json.loads(config.read_text("utf-8")), library), indent=2)
        config.write_text(text + "\n", "utf-8")
    return done


__all__ = ["HOOK", "PLAN", "SavePretrained", "is_marked", "library_of", "marked"]
