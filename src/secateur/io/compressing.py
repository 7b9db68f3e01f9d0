"""Compress a checkpoint that may be larger than memory, from files to files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.arguments import FLAG, PATH, check
from secateur.calibrate.data import taken
from secateur.compensate import Compensation, LeastSquares, Outcome, carry_out
from secateur.distributed import ranks
from secateur.errors import FileError, PlanError
from secateur.importance import Importance
from secateur.io.checkpoint import check_target, shards_of, writing
from secateur.io.file import about
from secateur.io.mapped import outline_of, usual_dtype, with_weights, without_values
from secateur.io.shards import Shards
from secateur.pipeline.compress import Compressed, Counted, compressed, params, ranking
from secateur.pipeline.save_pretrained import PLAN
from secateur.planning import Plan, plan
from secateur.planning.targets import Target
from secateur.surgery import carry_out as cut_as_planned
from secateur.tracing import macs, trace, unwrap
from secateur.verify.beside import prove

_WHAT = "compress_checkpoint"


def compress_checkpoint(
    folder: str | os.PathLike[str],
    target: Target,
    batches: Any,
    out: str | os.PathLike[str],
    *,
    example: Any = None,
    model: nn.Module | None = None,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
    ridge: float = 1e-3,
    loadable: bool = False,
    verify: bool = True,
) -> Compressed:
    """Compress a checkpoint in safetensors into a new folder, without training; the model may be larger than memory.

    >>> import secateur as sec, tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import load_file, save_file
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> folder, batches = Path(tempfile.mkdtemp()), [torch.randn(64, 8) for _ in range(4)]
    >>> save_file(net.state_dict(), folder / "model.safetensors")
    >>> report = sec.compress_checkpoint(folder, sec.Macs(0.5), batches, folder / "small", model=net)
    >>> again = sec.compress(net, batches[0], sec.Macs(0.5), batches, timed=False)
    >>> small = load_file(folder / "small" / "model.safetensors")
    >>> report.plan == again.plan, torch.allclose(small["4.weight"], net[4].weight)
    (True, True)

    What `compress` does in memory: rank, plan, cut, verify, refit; no axis is rotated. Here the weights stay in their
    files, which are mapped, and those of the small model are mapped from the new files. Batches go from layer to layer
    in turn, so the system reads a layer when its turn comes and lets go of it afterwards. What is held is one batch of
    activations and what a layer takes to be solved for.

    `example` is what the model is traced with; the first batch if none is given. `model` is one of the checkpoint's
    class, of full size, whose weights do not count (parameters on the meta device will do); Transformers' models are
    found by config.json. The other keywords are those of `compress`. `loadable=True` makes an ordinary checkpoint,
    which `from_pretrained` loads; any other plan is beside config.json, as secateur.json. `out` appears when it is
    complete: a crash or a full disk leaves nothing under that name.
    """
    start = time.perf_counter()
    check(_WHAT, FileError, locals(), folder=PATH, out=PATH)
    check(_WHAT, PlanError, locals(), exact=FLAG, loadable=FLAG, verify=FLAG)
    check_one_process(_WHAT)
    files = Checkpoint.of(folder, model)
    with about(out) as place:
        check_target(files.shards.folder, place)
    with taken(batches, _WHAT, example) as data:
        graph = trace(files.model, data[0] if example is None else example)
        criterion = ranking(data) if importance is None else importance
        options: dict[str, Any] = {"exact": exact, "protect": protect, "round_to": round_to, "loadable": loadable}
        made = plan(graph, target, importance=criterion, **options)
        small, reached = files.cut(made, out, LeastSquares(data, ridge=ridge), verify=verify)
    assert reached is not None
    before, after = Counted(graph.macs(), params(files.model)), Counted(macs(small, graph.example), params(small))
    return compressed(made, reached, before, after, criterion, start)


def check_one_process(what: str) -> None:
    """Refuse ranks that would all write the same files."""
    if ranks() > 1:
        raise FileError(f"{what} is for one process; call it on one rank, within secateur.distributed.alone()")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in safetensors, and a model whose weights are in these files."""

    shards: Shards
    model: nn.Module
    _outline: nn.Module  # without weights

    @staticmethod
    def of(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Checkpoint:
        """The checkpoint in a folder; a model of its class is told, or found by config.json."""
        with about(folder) as source:
            shards = shards_of(source)
            outline = _outline(shards, model)
            whole, _ = with_weights(outline, shards)
        return Checkpoint(shards, whole, outline)

    def cut(
        self, plan: Plan, out: str | os.PathLike[str], recipe: Compensation | None = None, *, verify: bool = True
    ) -> tuple[nn.Module, Outcome | None]:
        """Write the cut checkpoint, proved and refitted; its model, whose weights are there, and what was reached."""
        with self.written(plan, out) as small:
            if verify:
                prove(self.model, small, plan)
            reached = None if recipe is None else carry_out(recipe, self.model, small, plan)
        return small, reached

    @contextmanager
    def written(self, plan: Plan, out: str | os.PathLike[str]) -> Iterator[nn.Module]:
        """The cut model, whose weights are in new files: what is written to them stays if the block ends well."""
        with writing(self.shards, plan, self._outline, out) as new:
            empty = without_values(self._outline)
            cut_as_planned(empty, plan)
            small, joined = with_weights(empty, Shards.of(new), writable=True)
            yield small
            joined.store()


def _outline(shards: Shards, model: nn.Module | None) -> nn.Module:
    """A model of the checkpoint's class and size, without weights, in eval mode."""
    found = outline_of(shards.folder, usual_dtype(shards)) if model is None else without_values(unwrap(model))
    if found is None:
        raise FileError("its config.json does not name a class of Transformers; pass the model (model=…)")
    before = shards.folder / PLAN
    if before.is_file():  # it was cut already
        cut_as_planned(found, Plan.from_json(before.read_text("utf-8")))
    return found.eval()


__all__ = ["Checkpoint", "check_one_process", "compress_checkpoint"]
