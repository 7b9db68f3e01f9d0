"""A file that a recovery can be taken up from: the best weights so far, and what led to them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.errors import FileError
from secateur.io.file import about
from secateur.schedule.checkpoint import fingerprint, random_state, set_random_state
from secateur.state.held import named_tensors
from secateur.training.kept import MALFORMED, keep, kept
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
        if not self.path.exists():
            return None
        data = kept(self.path, _KEY, f"; {_ANEW}")
        with about(self.path):
            if data.get("task") != dict(self.task):
                raise FileError(f"it is not that of this model and seed; {_ANEW}")
            try:
                rounds = tuple(
                    Trained(float(r), int(n), float(b), float(a), float(s)) for r, n, b, a, s in data["rounds"]
                )
                length, idle, taken = (int(data[name]) for name in ("length", "idle", "taken"))
                found = RecoveryState(rounds, float(data["rate"]), length, idle, taken, data["values"])
                shapes = {name: tuple(tensor.shape) for name, tensor in found.values.items()}
            except MALFORMED as error:
                raise FileError(f"it is damaged: {error!r:.80}; {_ANEW}") from None
            if shapes != dict(self.names):
                raise FileError(f"its tensors are not those of this model; {_ANEW}")
            set_random_state(data.get("random"))
            return found

    def commit(self, found: RecoveryState) -> None:
        """Make this what a new process goes on from."""
        state = {**vars(found), "rounds": [dataclasses.astuple(one) for one in found.rounds]}
        keep(self.path, _KEY, {"task": self.task, "random": random_state(), **state})
