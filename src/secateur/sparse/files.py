"""Zeros in a checkpoint that may be larger than memory, from files to files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from secateur.calibrate.data import taken
from secateur.io.checkpoint import check_target
from secateur.io.compressing import Checkpoint, check_one_process
from secateur.io.file import about
from secateur.planning import Plan
from secateur.sparse.oneshot import OneShot, judges
from secateur.sparse.patterns import Pattern
from secateur.sparse.report import Sparsified
from secateur.sparse.spread import Spread

_WHAT = "sparsify_checkpoint"
_NOTHING = Plan((), {}, {}, ())  # is cut


def sparsify_checkpoint(
    folder: str | os.PathLike[str],
    pattern: Pattern,
    batches: Any,
    out: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    method: Any = None,
    protect: Sequence[str] = (),
    include: Sequence[str] = (),
    spread: Spread | None = None,
    held_back: Any = None,
) -> Sparsified:
    """Set weights of a checkpoint in safetensors to zero, into a new folder; the model may be larger than memory.

    >>> import secateur as sec, tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import load_file, save_file
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> folder, batches = Path(tempfile.mkdtemp()), [torch.randn(64, 8) for _ in range(4)]
    >>> save_file(net.state_dict(), folder / "model.safetensors")
    >>> _ = sec.sparsify_checkpoint(folder, sec.NM(2, 4), batches, folder / "sparse", model=net)
    >>> _ = sec.sparsify(net, batches, sec.NM(2, 4))
    >>> sparse = load_file(folder / "sparse" / "model.safetensors")
    >>> all(torch.equal(sparse[name], tensor) for name, tensor in net.state_dict().items())
    True

    What `sparsify` does in memory, layer by layer, and its keywords. Here the dense weights stay in their files, which
    are mapped, and the weights with zeros are written to the new ones, which the library of the model opens as it
    opened the old. `model` is one of the checkpoint's class, whose weights do not count (parameters on the meta device
    will do); Transformers' models are found by config.json. `out` appears when it is complete: a crash or a full disk
    leaves nothing under that name.
    """
    check_one_process(_WHAT)
    options = {"method": method, "protect": protect, "include": include, "spread": spread}
    return zeros_in_files(Checkpoint.of(folder, model), pattern, batches, out, held_back=held_back, **options)


def zeros_in_files(
    files: Checkpoint, pattern: Pattern, batches: Any, out: str | os.PathLike[str], *, held_back: Any, **options: Any
) -> Sparsified:
    """Write a checkpoint with zeros; what came of it."""
    job = OneShot(pattern, **options)
    with about(out) as place:
        check_target(files.shards.folder, place)
    with taken(batches, _WHAT) as data, judges(held_back) as kept_back:
        found = job.surveyed(files.model, data[0])
        with files.written(_NOTHING, out) as sparse:
            return job.solved(files.model, sparse, found, data, kept_back)


__all__ = ["sparsify_checkpoint", "zeros_in_files"]
