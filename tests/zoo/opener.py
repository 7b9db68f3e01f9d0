"""Cuts models such that their own library opens the result, and has that done in another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import secateur as sec
from zoo.reopened import tensors

SHARE = 0.75


class Opener:
    """A process that opens folders."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("reopened.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"HF_HUB_OFFLINE": "1"},
        )

    def __call__(self, library: str, name: str, folder: Path) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{library} {name} {folder}\n")
        self._process.stdin.flush()
        while (told := self._process.stdout.readline()) and not told.startswith(f"{folder} "):
            pass  # the answer to a question that somebody gave up waiting for
        return told.removeprefix(f"{folder} ").strip()

    def close(self) -> None:
        self._process.communicate()


def reopened(model: Any, example: Any, timm: str, opener: Opener, folder: Path) -> tuple[str, str]:
    """What becomes of a model ("same", "aligned", "refused"), and the fields or the reason; `timm`: its name there."""
    try:
        plan = sec.plan(sec.trace(model, example, variants=False), sec.Params(SHARE), loadable=True)
    except sec.PlanError as error:
        return "refused", str(error)
    assert plan.params.after <= SHARE * plan.params.before
    return answered(model, plan, example, timm, opener, folder)


def answered(model: Any, plan: sec.Plan, example: Any, timm: str, opener: Opener, folder: Path) -> tuple[str, str]:
    """What another process says to a model that is cut by a plan, and the fields."""
    sec.apply(model, plan, verify=False)  # that cuts are right is for others to show
    with torch.no_grad():
        output = tensors(model(**example) if isinstance(example, dict) else model(example))
    if timm:
        folder.mkdir()
        torch.save(dict(plan.fields), folder / "fields.pt")
        torch.save(model.state_dict(), folder / "weights.pt")
    else:
        model.save_pretrained(folder)
    torch.save(example, folder / "example.pt")
    torch.save(output, folder / "output.pt")
    library = type(model).__module__.partition(".")[0]
    answer = opener(library, timm or type(model).__name__, folder)
    shutil.rmtree(folder)
    return answer, f"{plan.params.after / plan.params.before:.3f} of the parameters, {plan.fields}"
