"""What a rank does with distributed checkpoints; the jobs that `test_parting.py` asks for."""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from sharding import BATCHES, IDS, distance, in_parallel, llama, mlp, net, out, per_layer, train, whole
from torch.distributed.tensor import DTensor

import secateur as sec
from secateur.distributed import alone
from secateur.io import parts

TIED = partial(llama, tie_word_embeddings=True)
MODELS = {
    "net": (net, per_layer, torch.zeros(2, 8), BATCHES),
    "llama": (TIED, per_layer, IDS, [IDS]),
    "mlp": (mlp, in_parallel, torch.zeros(2, 8), BATCHES),
}


def folder():
    return Path(os.environ["SECATEUR_JOBS_FOLDER"])


def save_parts(rank, world):
    """Cut and trained, then saved twice: by each rank its part, and as a whole."""
    found = {}
    for name, (make, shard, example, batches) in MODELS.items():
        model = make()
        shard(model)
        plan = sec.plan(sec.trace(model, example, variants=False), sec.Ratio(0.5), round_to=4)
        sec.apply(model, plan, shard=shard)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), batches)
        sec.save(model, folder() / name, sharded=True)
        sec.save(model, folder() / f"{name}.safetensors")
        found[name] = sorted(file.name for file in (folder() / name).iterdir())
    return found


def load_few_parts(rank, world):
    return load_parts(rank, world, ["net", "mlp"])  # what is quick to import


def load_parts(rank, world, names=tuple(MODELS)):
    """From the meta device, whatever the number of ranks."""
    found = {}
    for name in names:
        make, shard, example, batches = MODELS[name]
        with alone():
            want = sec.load(folder() / f"{name}.safetensors", make())
        with torch.device("meta"):
            model = make()
        sec.load(folder() / name, model, shard=shard)
        hidden, optimizer = dict(want.named_buffers()), torch.optim.SGD(model.parameters(), lr=0.01)
        found[name] = {
            "weights": distance(whole(model), want.state_dict()),
            "buffers": distance(dict(model.named_buffers()), hidden) if hidden else 0.0,
            "out": float((out(model, example) - out(want, example)).abs().max()),
            "sharded": sum(isinstance(param, DTensor) for param in model.parameters()),
            "ties": len(dict(model.named_parameters())) == len(dict(want.named_parameters())),
        }
        train(model, optimizer, batches)
        train(want, torch.optim.SGD(want.parameters(), lr=0.01), batches)
        found[name]["trained"] = distance(whole(model), want.state_dict())
        again = Path(os.environ["SECATEUR_JOBS_OUT"], name)
        sec.save(model, again, sharded=True)
        with alone():
            found[name]["again"] = distance(sec.load(again, make()).state_dict(), whole(model))
    return found


def parts_that_fail(rank, world):
    """A full disk on one rank, a folder that is there, a file that one rank does not have, a function that fails."""
    model = net()
    per_layer(model)
    there = Path(os.environ["SECATEUR_JOBS_OUT"])
    real = os.fsync
    if rank == 1:

        def full(_):
            raise OSError(28, "No space left on device")

        os.fsync = full
    said = {}
    try:
        said["full"] = _raised(lambda: sec.save(model, there / "full", sharded=True))
    finally:
        os.fsync = real
    dist.barrier()
    said["left"] = [file.name for file in there.iterdir() if file.name.startswith((".secateur", "full"))]
    if rank == 0:
        (there / "taken").mkdir()
        (there / "taken" / "mine").write_text("mine")
    dist.barrier()
    said["taken"] = _raised(lambda: sec.save(model, there / "taken", sharded=True))
    sec.save(model, there / "whole", sharded=True)
    fresh = net()
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    said["lacks"] = _raised(lambda: sec.load(there / ("whole" if rank else "nowhere"), fresh, shard=per_layer))
    said["fails"] = _raised(lambda: sec.load(there / "whole", fresh, shard=lambda m: (per_layer(m), 1 / (rank - 1))[0]))
    said["plain"] = _raised(lambda: sec.load(there / "whole", fresh, shard=lambda m: None))
    said["other"] = _raised(lambda: sec.load(there / "whole", mlp(), shard=per_layer))
    said["same"] = distance(fresh.state_dict(), before) == 0 and type(fresh).__name__ == "Net"
    sec.load(there / "whole", fresh, shard=per_layer)
    said["then"] = distance(whole(fresh), whole(model))
    return said


def _raised(call):
    try:
        call()
    except (sec.SecateurError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def part_missing(rank, world):
    """The folder is not the same for all ranks: what rank 1 writes is not there for rank 0."""
    model = net()
    per_layer(model)
    there, real = Path(os.environ["SECATEUR_JOBS_OUT"]), parts.compat.write_parts

    def elsewhere(tensors, folder, **more):
        return real(tensors, folder + "-elsewhere" if rank else folder, **more)

    parts.compat.write_parts = elsewhere
    try:
        return _raised(lambda: sec.save(model, there / "split", sharded=True))
    finally:
        parts.compat.write_parts = real
