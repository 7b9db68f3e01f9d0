"""How many architectures are cut such that their own library opens the result, and why not the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import secateur as sec
from zoo.architectures import MODELS, build
from zoo.reopened import tensors

TRANSFORMERS = [line for line in MODELS if line.startswith("transformers ")]
TIMM = [line for line in MODELS if line.startswith("timm ")]
SHARE = 0.75
REFUSED = {  # with what the refusal must name
    "transformers bloom": "inv_norm_factor",  # heads have slopes by number, and a head's width is in its scale
    "transformers mpt": "d_model",  # the same
    "transformers marian": "cannot be reached",  # most of it are embeddings, whose width crosses to an encoder unseen
    "transformers layoutlm": "hidden_size",  # the width is that of the output
    "transformers whisper": "d_model",  # the same
    "transformers clip": "cannot be reached",  # the same
    "transformers efficientnet": "no counts were found",  # which does not say that there are none
}


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
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    one = Opener()
    yield one
    one.close()


def reopened(line: str, opener: Opener, folder: Path) -> tuple[str, str]:
    """What becomes of an architecture ("same", "aligned", "refused"), and the fields or the reason."""
    torch.set_num_threads(1)
    library, name = line.split()
    model, example = build(line)
    try:
        plan = sec.plan(sec.trace(model, example, variants=False), sec.Params(SHARE), loadable=True)
    except sec.PlanError as error:
        return "refused", str(error)
    sec.apply(model, plan)
    assert plan.params.after <= SHARE * plan.params.before
    with torch.no_grad():
        output = tensors(model(**example) if isinstance(example, dict) else model(example))
    if library == "timm":
        folder.mkdir()
        torch.save(dict(plan.fields), folder / "fields.pt")
        torch.save(model.state_dict(), folder / "weights.pt")
    else:
        name = type(model).__name__
        model.save_pretrained(folder)
    torch.save(example, folder / "example.pt")
    torch.save(output, folder / "output.pt")
    answer = opener(library, name, folder)
    shutil.rmtree(folder)
    return answer, f"{plan.params.after / plan.params.before:.3f} of the parameters, {plan.fields}"


SOME = ("transformers mpnet", "transformers xlnet", "transformers bloom")


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line in SOME else pytest.mark.zoo) for line in (*TRANSFORMERS, *TIMM)]
)
def test_architecture(line: str, opener: Opener, tmp_path: Path) -> None:
    answer, said = reopened(line, opener, tmp_path / "model")
    print(f"{line:<30} {answer:<8} {said}", flush=True)
    if line in REFUSED:
        assert answer == "refused"
        assert REFUSED[line] in said
    else:
        assert answer in ("same", "aligned"), said


def test_most_of_transformers_open() -> None:
    """By the names above; that these and no others are refused is for each to show."""
    assert len([line for line in TRANSFORMERS if line not in REFUSED]) >= 75
