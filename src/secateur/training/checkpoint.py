"""A file that a recovery can be taken up from: the best weights so far, and what led to them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from secateur.errors import FileError
from secateur.io.atomic import replacing
from secateur.io.file import about
from secateur.planning.json import parse
from secateur.schedule.checkpoint import fingerprint, random_state, set_random_state
from secateur.state.held import named_tensors
from secateur.training.outcome import Trained

_KEY = "secateur_recover"
_ANEW = "give another file, or remove this one to start anew"


@dataclass(frozen=True)
class RecoveryState:
    """What a checkpoint holds."""

    rounds: Sequence[Trained]
    rate: float  # of the next round
    length: int  # of the next round
    idle: int  # rounds that brought nothing, one after the other
    taken: int  # steps
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class RecoveryCheckpoint:
    """One file of one recovery: that of a model with certain weights, and a seed."""

    path: Path
    task: Mapping[str, Any]
    names: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(path: str | os.PathLike[str], model: nn.Module, seed: int) -> RecoveryCheckpoint:
        """That of a model as it is now."""
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
        return RecoveryCheckpoint(Path(path), {"weights": fingerprint(model), "seed": seed}, shapes)

    def resume(self) -> RecoveryState | None:
        """What was kept; None if nothing was. A file of another recovery is refused."""
        with about(self.path) as path:
            if not path.exists():
                return None
            try:
                with safe_open(path, framework="pt") as file:
                    data = parse(((file.metadata() or {}).get(_KEY) or "null").encode())
                    values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise FileError(f"this is no checkpoint: {error}; {_ANEW}") from None
            if not isinstance(data, dict) or data.get("task") != dict(self.task):
                raise FileError(f"it is not that of this model and seed; {_ANEW}")
            if {name: tuple(tensor.shape) for name, tensor in values.items()} != dict(self.names):
                raise FileError(f"its tensors are not those of this model; {_ANEW}")
            set_random_state(data.get("random"))
            length, idle, taken = (int(_number(data.get(name))) for name in ("length", "idle", "taken"))
            return RecoveryState(_rounds(data.get("rounds")), _number(data.get("rate")), length, idle, taken, values)

    def commit(self, found: RecoveryState) -> None:
        """Make this what a new process goes on from."""
        rounds = [[one.rate, one.steps, one.before, _finite(one.after), one.seconds] for one in found.rounds]
        now = {"rate": found.rate, "length": found.length, "idle": found.idle, "taken": found.taken}
        data = {"task": dict(self.task), "rounds": rounds, **now, "random": random_state()}
        values = {name: value.contiguous() for name, value in found.values.items()}
        with about(self.path) as path, replacing(path, overwrite=True) as new:
            save_file(values, new, {_KEY: json.dumps(data, allow_nan=False)})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _rounds(data: Any) -> tuple[Trained, ...]:
    try:
        return tuple(
            Trained(
                _number(rate), int(steps), _number(before), math.nan if after is None else _number(after), _number(s)
            )
            for rate, steps, before, after, s in data
        )
    except (TypeError, ValueError) as error:
        raise FileError(f"its list of rounds is none: {error!r}; {_ANEW}") from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FileError(f"it has {value!r} where a number belongs; {_ANEW}")
    return float(value)
