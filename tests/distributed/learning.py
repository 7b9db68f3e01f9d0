"""What a rank does that trains a model with others while it is pruned; the jobs that `test_learning.py` asks for."""

import copy
import hashlib
import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import secateur as sec
from secateur import training
from secateur.schedule import linear

EXAMPLE = torch.zeros(1, 6)
WHATS = {
    "cuts": lambda: training.Cuts(EXAMPLE, sec.Macs(0.5), every=4, schedule=linear(2)),
    "learned": lambda: training.Learned(EXAMPLE, sec.Macs(0.5), steps=20, strength=1e-3),
    "gmp": lambda: training.Masks(training.GMP(0.8, begin=1, end=9, every=2)),
    "rigl": lambda: training.Masks(training.RigL(0.8, every=2, end=50)),
    "set": lambda: training.Masks(training.SET(0.8, every=2, end=50)),
    "srste": lambda: training.Masks(training.SRSTE(), protect=("0.weight",)),
}


def net(norm=False, seed=3):
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(24) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 24), middle, nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))


def part(step, rank, micro=0, micros=1):
    """Batches of all ranks are of one size, so that the mean of their gradients is that of all their data."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return whole.chunk(micros)[micro]


def loss(model, x):
    return F.mse_loss(model(x), x[:, :3])


def steps(kind):
    return 22 if kind == "learned" else 12


def train(model, optimizer, pruning, rank, first=0, last=12, micros=1, ema=None):
    for step in range(first, last):
        optimizer.zero_grad()
        for micro in range(micros):
            syncs = nullcontext() if micro == micros - 1 else model.no_sync()
            with syncs:
                (loss(model, part(step, rank, micro, micros)) / micros).backward()
        optimizer.step()
        if ema is not None:
            ema.update_parameters(model.module)
        pruning.step()


def digest(model):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()


def shapes(model):
    return [list(p.shape) for p in model.parameters()]


def distance(ours, theirs):
    if shapes(ours) != shapes(theirs):
        return "other shapes"
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@cache
def in_one_process(kind, world):
    """The same training with the data of all ranks."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    pruning = training.Pruning(WHATS[kind]())
    with sec.distributed.alone():
        pruning.begin(model, optimizer)
        for step in range(steps(kind)):
            optimizer.zero_grad()
            loss(model, torch.cat([part(step, rank) for rank in range(world)])).backward()
            optimizer.step()
            pruning.step()
        pruning.finish()
    return model


def begun(kind, rank, model=None, ema=None, **options):
    wrapped = DistributedDataParallel(net() if model is None else model, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    pruning = training.Pruning(WHATS[kind]())
    pruning.begin(wrapped, optimizer, copies=() if ema is None else (ema,))
    return wrapped, optimizer, pruning


def pruned(kind):
    def job(rank, world):
        """Buffers are not broadcast, so that masks are the same only if every rank makes the same."""
        wrapped, optimizer, pruning = begun(kind, rank, broadcast_buffers=False)
        train(wrapped, optimizer, pruning, rank, last=steps(kind))
        masks = digest(wrapped.module)
        pruning.finish()
        single = in_one_process(kind, world)
        return {"whole": masks, "far": distance(wrapped.module, single), "shapes": shapes(single)}

    return job


cuts, learned, gmp, rigl, set_, srste = map(pruned, ("cuts", "learned", "gmp", "rigl", "set", "srste"))


def wrapped_in_other_ways(rank, world):
    """Options of the wrapper that a cut has to get along with, and gradients that add up over batches."""
    found = {}
    many = {"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": 0.0001}
    for name, micros, options in (("static graph", 1, {"static_graph": True}), ("others", 2, many)):
        wrapped, optimizer, pruning = begun("cuts", rank, **options)
        train(wrapped, optimizer, pruning, rank, micros=micros)
        found[name] = [digest(wrapped.module), distance(wrapped.module, in_one_process("cuts", world))]
    return found


def compressed_gradients(rank, world):
    """A communication hook without a state goes along; one with a state is refused before anything happens."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped = DistributedDataParallel(net())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    pruning = training.Pruning(WHATS["cuts"]())
    pruning.begin(wrapped, optimizer)
    train(wrapped, optimizer, pruning, rank)
    other = DistributedDataParallel(net())
    other.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    before = digest(other.module)
    try:
        training.Pruning(WHATS["cuts"]()).begin(other, torch.optim.SGD(other.parameters(), 1e-2))
        said = "nothing was raised"
    except sec.SecateurError as error:
        said = str(error)
    return {
        "whole": digest(wrapped.module),
        "far": distance(wrapped.module, in_one_process("cuts", world)),
        "said": said,
        "same": before == digest(other.module),
    }


def average(rank, world):
    """With batch norms, whose statistics differ between ranks when it is cut, and an average of the weights."""
    model = net(norm=True)
    ema = AveragedModel(model)
    wrapped, optimizer, pruning = begun("cuts", rank, model, ema)
    train(wrapped, optimizer, pruning, rank, ema=ema)
    weights = [p.detach().tolist() for p in ema.module.parameters()]
    return [shapes(model), shapes(ema.module), hashlib.sha256(repr(weights).encode()).hexdigest()]


def goes_on(rank, world):
    """From a file that one rank wrote, in the middle."""
    found = {}
    for kind in ("cuts", "rigl"):
        file = Path(os.environ["SECATEUR_JOBS_OUT"], f"{kind}.safetensors")
        wrapped, optimizer, pruning = begun(kind, rank)
        train(wrapped, optimizer, pruning, rank, last=6)
        kept = copy.deepcopy([wrapped.module.state_dict(), optimizer.state_dict()])
        if rank == 0:
            pruning.save(file)
        torch.distributed.barrier()
        train(wrapped, optimizer, pruning, rank, first=6)

        again, other = net(seed=9), training.Pruning(WHATS[kind]())
        other.resume(again, file)
        again.load_state_dict(kept[0])
        anew = DistributedDataParallel(again)
        fresh = torch.optim.AdamW(anew.parameters(), 1e-2)
        fresh.load_state_dict(kept[1])
        other.begin(anew, fresh)
        train(anew, fresh, other, rank, first=6)
        found[kind] = [digest(wrapped.module), digest(again), other.log() == pruning.log()]
    return found


def compiled(rank, world):
    wrapped, optimizer, pruning = begun("cuts", rank)
    model = torch.compile(wrapped, backend="eager")
    train(model, optimizer, pruning, rank)
    return [digest(wrapped.module), distance(wrapped.module, in_one_process("cuts", world))]


def failed_cut(rank, world):
    """A cut that is taken back leaves a wrapper that still shares gradients."""
    from secateur.pipeline import apply as room

    wrapped = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(wrapped.parameters(), 1e-2)
    loss(wrapped, part(0, rank)).backward()
    real = room.check

    def check(*args):
        raise sec.VerifyError("on purpose")

    room.check = check
    plan = sec.plan(sec.trace(wrapped, EXAMPLE), sec.Ratio(0.5))
    try:
        sec.apply(wrapped, plan, optimizer=optimizer)
        return "nothing was raised"
    except sec.SecateurError:
        pass
    finally:
        room.check = real
    for step in range(3):
        optimizer.zero_grad()
        loss(wrapped, part(step, rank)).backward()
        optimizer.step()
    return [digest(wrapped.module), digest(wrapped.module) != digest(net())]
