"""A folder that a run can be taken up from, whenever it was killed.

    state.json               what was asked for, the rounds so far, the state of the global random generators
    round-003.safetensors    the best model so far, by `secateur.save`; none while that is the uncut one

The state is the point of commitment: a model is written beside the one before, then a new state takes the place of the
old one in a single step, then the model that no state speaks of goes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.arguments import shown
from secateur.distributed import meet, ranks
from secateur.errors import FileError
from secateur.io import load, save
from secateur.io.atomic import replacing
from secateur.io.file import about, class_name
from secateur.io.tensors import State
from secateur.planning.json import parse
from secateur.schedule.rounds import Iteration, Round
from secateur.state.chances import Chances

VERSION = 1
_STATE = "state.json"
_ANEW = "give another folder, or remove this one to start anew"
_MODEL = re.compile(r"round-\d+\.safetensors")
_NUMPY = "MT19937"  # the only generator that NumPy's global functions have, unless somebody puts in another
_WORDS = 624  # of its state
_PART = re.compile(r"\.secateur-[0-9a-f]+\.tmp")  # a file that a killed process was writing


@dataclass(frozen=True)
class Task:
    """What a run was asked for; another run may go on with its checkpoint only if it asks for the same."""

    model: str
    weights: str
    macs: int
    target: str
    schedule: tuple[float, ...]
    floor: float | None

    @staticmethod
    def of(model: nn.Module, macs: int, target: object, schedule: tuple[float, ...], floor: float | None) -> Task:
        shape = re.sub(r" at 0x[0-9a-f]+", "", repr(target))  # an address says nothing in another process
        return Task(class_name(model), fingerprint(model), macs, shape, schedule, floor)

    def check(self, other: Mapping[str, Any]) -> None:
        """Refuse the task of another run."""
        words = {
            "model": "a {}, this model is a {}",
            "weights": "other weights (SHA-256 {:.8}…, here {:.8}…): start from the model that it started from",
            "macs": "an example that takes {} MACs, this one takes {}",
            "target": "the target {}, this one is {}",
            "schedule": "the schedule {}, this one is {}",
            "floor": "the floor {}, this one is {}",
        }
        for name, here in json.loads(json.dumps(dataclasses.asdict(self))).items():
            there = other.get(name)
            if there != here:
                story = words[name].format(shown(there).strip("'"), shown(here).strip("'"))
                raise FileError(f"it was begun with {story}; {_ANEW}")


def fingerprint(model: nn.Module) -> str:
    """A fingerprint of the names, shapes, dtypes and values of a model's tensors."""
    state = State.of(model)
    found = hashlib.sha256()
    for name, tensor in sorted({**state.tensors, **state.extra}.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class ScheduleCheckpoint:
    """The checkpoint of one task in a folder, which is made where there is none."""

    def __init__(self, folder: str | os.PathLike[str], task: Task) -> None:
        self._task = task
        with about(folder) as path:
            path.mkdir(parents=True, exist_ok=True)
            self._folder = path

    def resume(self, model: nn.Module) -> Iteration | None:
        """Bring an uncut model to where the run was left, and the random generators with it; None if it never was."""
        with about(self._folder / _STATE) as path:
            if meet("iterate: resuming", "yes" if path.exists() else "no")[0] == "no":  # as rank 0 finds it
                self._check_empty()
                return None
            data = parse(path.read_bytes())
            if not isinstance(data, dict) or data.get("secateur_iterate") != VERSION:
                raise FileError(f"this is no checkpoint that this library can read; {_ANEW}")
            self._task.check(data["task"] if isinstance(data.get("task"), dict) else {})
            found = Iteration(_rounds(data.get("rounds"), self._task.schedule), self._task.floor)
        if found.best.number:
            load(self._file(found.best), model)
        with about(path):
            set_random_state(_own(data))
        meet("iterate: resumed")
        if _writes():
            self._tidy(found.best)
        return found

    def commit(self, found: Iteration, model: nn.Module) -> None:
        """Make the last round the one to go on from."""
        states = meet("iterate: a round", json.dumps(random_state()))
        if _writes():
            self._write(found, model, [json.loads(state) for state in states])
        meet("iterate: a round is kept")

    def _write(self, found: Iteration, model: nn.Module, states: list[Any]) -> None:
        last = found.rounds[-1]
        if last is found.best and last.number:
            save(model, self._file(last))
        data = {
            "secateur_iterate": VERSION,
            "task": dataclasses.asdict(self._task),
            "rounds": [_plain(one) for one in found.rounds],
            "random": states[0],
            **({"others": states[1:]} if len(states) > 1 else {}),  # of further ranks
        }
        with about(self._folder / _STATE) as path, replacing(path, overwrite=True) as new:
            new.write_text(json.dumps(data, allow_nan=False))
        self._tidy(found.best)

    def _file(self, one: Round) -> Path:
        return self._folder / f"round-{one.number:03}.safetensors"

    def _check_empty(self) -> None:
        """A state is written before any model, so that models without one are somebody else's."""
        for path in self._folder.iterdir():
            if _MODEL.fullmatch(path.name):
                raise FileError(f"it is not there, but {path.name} is, which a new run would replace; {_ANEW}")

    def _tidy(self, best: Round) -> None:
        """Remove what runs that were killed left behind, and models that are no longer needed."""
        with about(self._folder) as folder:
            for path in folder.iterdir():
                if (_MODEL.fullmatch(path.name) or _PART.fullmatch(path.name)) and path != self._file(best):
                    path.unlink(missing_ok=True)


def _writes() -> bool:
    """Whether this process is the one that writes: the only one, or rank 0."""
    return ranks() == 1 or dist.get_rank() == 0


def _own(data: Mapping[str, Any]) -> Any:
    """The state of the random generators of this process."""
    others = data.get("others", [])
    if not isinstance(others, list) or len(others) + 1 != ranks():
        raise FileError(f"it was begun on another number of ranks than {ranks()}; {_ANEW}")
    return [data.get("random"), *others][0 if ranks() == 1 else dist.get_rank()]


def _plain(one: Round) -> dict[str, Any]:
    """A round as JSON, which has no NaN and no infinity: they are written as text."""
    items = dataclasses.asdict(one).items()
    return {name: value if math.isfinite(value) else str(value) for name, value in items}


def _rounds(data: Any, schedule: tuple[float, ...]) -> tuple[Round, ...]:
    try:
        rounds = tuple(_round(**one) for one in data)
    except (TypeError, ValueError, KeyError) as error:
        raise FileError(f"its list of rounds is none: {error!r}; {_ANEW}") from None
    if not rounds or [(one.number, one.part) for one in rounds] != list(enumerate((0.0, *schedule)))[: len(rounds)]:
        raise FileError(f"its rounds are not those of its schedule, from 0 on; {_ANEW}")
    return rounds


def _round(number: int, macs: int, params: int, **floats: float | str) -> Round:
    if any(type(whole) is not int for whole in (number, macs, params)):
        raise ValueError("a number, MACs or parameters that are not whole")
    return Round(number=number, macs=macs, params=params, **{name: float(value) for name, value in floats.items()})


def random_state() -> dict[str, Any]:
    """The state of the global random generators (torch's on the CPU and the device, NumPy's, Python's) as JSON data.

    >>> before = random_state()
    >>> drawn = torch.rand(1), np.random.rand(), random.random()
    >>> set_random_state(before)
    >>> drawn == (torch.rand(1), np.random.rand(), random.random())
    True
    """
    of_numpy: Any = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] != _NUMPY:
        raise FileError(f"NumPy's global generator is {of_numpy['bit_generator']}; a checkpoint can hold {_NUMPY} only")
    inner = {**of_numpy["state"], "key": of_numpy["state"]["key"].tolist()}
    chances = Chances.now()
    return {
        "torch": _as_text(chances.cpu),
        **({"device": [chances.device, *map(_as_text, chances.others)]} if chances.device else {}),
        "numpy": {**of_numpy, "state": inner},
        "python": random.getstate(),
    }


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def set_random_state(state: Any) -> None:
    """Put a state back that `random_state` gave, also after a way through JSON; all generators or none."""
    before = random_state()
    try:
        _set(state)
    except Exception as error:  # each generator complains in its own way
        _set(before)
        raise FileError(f"its state of the random generators cannot be used: {error!r}") from None


def _set(state: Any) -> None:
    device, *others = state.get("device", [""])
    Chances(_from_text(state["torch"]), device, tuple(map(_from_text, others))).restore()
    of_numpy = state["numpy"]
    key, pos = np.array(of_numpy["state"]["key"], np.uint32), of_numpy["state"]["pos"]
    if of_numpy["bit_generator"] != _NUMPY or key.shape != (_WORDS,) or pos not in range(_WORDS + 1):
        raise ValueError(f"no state of NumPy's {_NUMPY}")  # it would take a wrong position and read beyond its end
    np.random.set_state({**of_numpy, "state": {"key": key, "pos": pos}})
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
