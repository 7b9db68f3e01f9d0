"""What a model is besides its tensors and how it is built: which parameters learn, and how it generates by default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.arguments import shown
from secateur.errors import FileError
from secateur.pipeline.save_pretrained import frozen_in

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Settings:
    """`frozen`: the parameters that require no gradient; `generation`: Transformers' defaults. None: as it is built."""

    frozen: tuple[str, ...] | None = None
    generation: Mapping[str, Any] | None = None

    @staticmethod
    def of(model: nn.Module) -> Settings:
        """Those of a model.

        >>> Settings.of(nn.Linear(2, 2).requires_grad_(False)).frozen
        ('weight', 'bias')
        """
        config: Any = getattr(model, "generation_config", None)
        told = json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None
        return Settings(frozen_in(model), told)

    @staticmethod
    def read(frozen: Any, generation: Any) -> Settings:
        """Those that a file of unknown origin tells."""
        if frozen is not None and (not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen)):
            raise FileError("its list of parameters that do not learn is none; it is damaged")
        if generation is not None and not isinstance(generation, dict):
            raise FileError("its settings for generation are none; it is damaged")
        return Settings(None if frozen is None else tuple(frozen), generation)

    def put(self, model: nn.Module) -> None:
        """Give them to a model that was just built."""
        if self.frozen is not None:
            parameters = dict(model.named_parameters())
            odd = next((name for name in self.frozen if name not in parameters), None)
            if odd is not None:
                raise FileError(f"it says that {shown(odd)} does not learn, which is no parameter of the model")
            for name, parameter in parameters.items():
                if name in self.frozen or parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(name not in self.frozen)
        config: Any = getattr(model, "generation_config", None)
        if self.generation is not None and hasattr(type(config), "from_dict"):
            model.generation_config = type(config).from_dict(dict(self.generation))


__all__ = ["GENERATION", "Settings"]
