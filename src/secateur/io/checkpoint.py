"""Cut a checkpoint that may be larger than memory: file by file, tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.arguments import PATH, check, shown
from secateur.errors import FileError, PlanError
from secateur.io.atomic import check_new, new_folder
from secateur.io.file import about
from secateur.io.mapped import CONFIG, outline_of
from secateur.io.pieces import Left, Piece, check_whole, left, piece
from secateur.io.shards import Form, Shards, nbytes, read_json, write_shard
from secateur.io.tensors import State
from secateur.pipeline.save_pretrained import PLAN, marked
from secateur.planning.plans import Plan
from secateur.progress import progress
from secateur.state.held import named_tensors
from secateur.surgery.blocks import refuse_blocks
from secateur.surgery.cut import select
from secateur.tracing import unwrap

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data")
_INDICES = tuple(f"{ending}.index.json" for ending in _WEIGHTS)


def cut_checkpoint(
    folder: str | os.PathLike[str], plan: Plan, out: str | os.PathLike[str], *, model: nn.Module | None = None
) -> Path:
    """Cut a checkpoint in safetensors, file by file, into a new folder; returns that.

    >>> import secateur as sec, tempfile, torch
    >>> from safetensors.torch import load_file, save_file
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file(net.state_dict(), folder / "model.safetensors")
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5))
    >>> small = load_file(sec.cut_checkpoint(folder, plan, folder / "small") / "model.safetensors")
    >>> torch.equal(small["2.weight"], sec.apply(net, plan)[2].weight)
    True

    The values are bit for bit those that `apply` makes. One tensor is held at a time beside what the system maps, so
    the checkpoint may be larger than memory; the plan may come from a model on the meta device. Names of files, the
    index, the tokenizer and whatever else is in the folder come along; weights in other formats, which would be of
    the full size, do not. A plan whose `fields` say all is written into config.json; any other goes beside it, as
    secateur.json. The experts of a mixture, which a file holds one by one, are cut, renumbered or left out.

    `model` tells which tensors are tied and which are not stored; one on the meta device will do. Transformers' models
    are found by config.json. `out` appears when it is complete: a crash or a full disk leaves nothing under that name.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"cut_checkpoint takes a Plan, not {type(plan).__name__}; make one with secateur.plan")
    check("cut_checkpoint", FileError, locals(), folder=PATH, out=PATH)
    with about(folder) as source:
        shards = shards_of(source)
        outline = outline_of(source) if model is None else unwrap(model)
    with writing(shards, plan, outline, out):
        return Path(out)


@contextmanager
def writing(shards: Shards, plan: Plan, model: nn.Module | None, out: str | os.PathLike[str]) -> Iterator[Path]:
    """The cut checkpoint in a folder that will be at `out` when the block has ended well, and is gone if not."""
    with about(shards.folder):
        refuse_blocks(plan, "a checkpoint")
        job = _CutFiles.of(shards, plan, model)
        config = _config(shards.folder, plan)
    with about(out) as target:
        check_target(shards.folder, target)
        _check_room(target.absolute().parent, job)
    with new_folder(target) as new:
        with about(out):
            _fill(new, job, config)
        yield new


@dataclass(frozen=True)
class _CutFiles:
    """What is to be done with each tensor of each file."""

    shards: Shards
    plan: Plan
    left: Mapping[str, Left]

    @staticmethod
    def of(shards: Shards, plan: Plan, model: nn.Module | None) -> _CutFiles:
        """Refused where the plan and the files do not fit, tensor by tensor."""
        forms = {name: form for held in shards.forms.values() for name, form in held.items()}
        state = None if model is None else State.of(model)
        known = {*plan.kept, *(() if state is None else state.names())}
        pieces = {name: piece(name, known) for name in forms}
        unstored = set() if model is None or state is None else dict(named_tensors(model)).keys() - state.names()
        _check_known(pieces, plan, state, unstored)
        check_whole(pieces, plan)
        return _CutFiles(shards, plan, {name: left(name, forms[name].shape, of, plan) for name, of in pieces.items()})

    def forms(self, file: str) -> dict[str, Form]:
        """The tensors of a file after the cut."""
        made = {}
        for name, form in self.shards.forms[file].items():
            new, kept = self.left[name]
            if new is not None:
                sizes = (len(kept[d]) if d in kept else size for d, size in enumerate(form.shape))
                made[new] = Form(form.dtype, tuple(sizes))
        return made

    @property
    def size(self) -> int:
        """Bytes of all tensors after the cut."""
        return sum(nbytes(form) for file in self.shards.forms for form in self.forms(file).values())

    def tensors(self, file: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.shards.tensors(file):
            new, kept = self.left[name]
            if new is not None:
                yield new, select(tensor, kept) if kept else tensor


def _check_known(pieces: Mapping[str, Piece], plan: Plan, state: State | None, unstored: Collection[str]) -> None:
    """Refuse files that lack what the plan cuts, unless it is tied to something that they hold, or is never stored."""
    held = {of.whole for of in pieces.values()}
    missing = set(plan.kept) - held
    if state is None:
        if missing:
            raise PlanError(
                f"the plan cuts {shown(min(missing))}, which no file holds ({len(missing)} in all); if it is tied to "
                "another or not stored, pass the model (model=…, on the meta device will do)"
            )
        return
    for group in state.groups():
        if not held.isdisjoint(group):
            missing -= set(group)
    missing -= set(unstored)  # buffers that are not persistent
    if missing:
        raise PlanError(
            f"the plan cuts {shown(min(missing))}, which no file holds ({len(missing)} in all); does the checkpoint "
            "belong to a model of another class?"
        )
    cut = {name.rpartition(".")[0] for name in plan.kept}
    for name, of in pieces.items():
        if of.whole not in state.names() and of.whole not in plan.kept and name.rpartition(".")[0] in cut:
            raise PlanError(
                f"{shown(name)} is beside a tensor that is cut, but the model does not have it; is the checkpoint "
                "quantized? Cut one in the model's own dtype"
            )


def shards_of(folder: Path) -> Shards:
    """The files of a checkpoint; refused where they hold something else than a model's own numbers."""
    shards = Shards.of(folder)
    for metadata in shards.metadata.values():
        if metadata and "secateur" in metadata:
            raise FileError("it was written by secateur.save; load it with secateur.load, cut the model and save that")
    config = shards.folder / CONFIG
    if config.is_file() and read_json(config).get("quantization_config"):
        raise FileError("its weights are quantized, and their scales would no longer fit; cut the model before that")
    return shards


def _config(folder: Path, plan: Plan) -> dict[str, str]:
    """{file: its text} for what says how large the model is now; nothing if it is as large as before."""
    if plan.loadable and not plan.fields:
        return {}
    if plan.fields and (folder / CONFIG).is_file():
        return {CONFIG: json.dumps({**read_json(folder / CONFIG), **plan.fields}, indent=2) + "\n"}
    before = folder / PLAN
    whole = plan if not before.is_file() else Plan.from_json(before.read_text("utf-8")).then(plan)
    told = {PLAN: whole.to_json()}
    if (folder / CONFIG).is_file():
        config = read_json(folder / CONFIG)
        library = "diffusers" if "_class_name" in config else "transformers"
        told[CONFIG] = json.dumps(marked(config, library), indent=2) + "\n"
    return told


def check_target(folder: Path, target: Path) -> None:
    """Refuse a place where a cut checkpoint cannot be, or must not."""
    check_new(target)
    if os.path.realpath(target) == os.path.realpath(folder):
        raise FileError("this is the checkpoint itself; give the path of a new folder")


def _check_room(place: Path, job: _CutFiles) -> None:
    free = shutil.disk_usage(place).free
    if free < job.size:
        raise FileError(f"{job.size / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB free; write elsewhere")


def _fill(new: Path, job: _CutFiles, texts: Mapping[str, str]) -> None:
    """Write all files of the cut checkpoint."""
    where: dict[str, str] = {}
    for file in progress(list(job.shards.forms), "cutting files"):
        forms = job.forms(file)
        write_shard(new / file, forms, job.shards.metadata[file], job.tensors(file))
        where |= dict.fromkeys(forms, file)
    if job.shards.index is not None:
        index = read_json(job.shards.folder / job.shards.index)
        metadata: Any = index.get("metadata")
        metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": job.size}
        metadata.pop("total_parameters", None)
        texts = {**texts, job.shards.index: json.dumps({"metadata": metadata, "weight_map": where}, indent=2) + "\n"}
    for name, text in texts.items():
        (new / name).write_text(text, "utf-8")
    _copy_others(job.shards.folder, new, texts)


def _copy_others(folder: Path, new: Path, written: Collection[str]) -> None:
    """The tokenizer and whatever else is there, but for weights in other formats."""
    for file in folder.iterdir():
        others = file.is_file() and not file.name.endswith((*_WEIGHTS, *_INDICES)) and not file.name.startswith(".")
        if others and file.name not in written:
            shutil.copyfile(file, new / file.name)


__all__ = ["check_target", "cut_checkpoint", "shards_of", "writing"]
