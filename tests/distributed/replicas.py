"""What a rank does with a model that every rank has; the jobs that `test_replicas.py` asks for."""

import copy
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import secateur as sec
from secateur.distributed import alone, meeting

SPLIT = {2: (3, 2), 4: (2, 1, 0, 2)}  # batches of each rank


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def data(rank, count):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(16 + rank, 8, generator=generator) for _ in range(count)]


def dealt(world):
    """All batches in the order in which one process would have them."""
    per_rank = [data(rank, count) for rank, count in enumerate(SPLIT[world])]
    return [each[i] for i in range(max(SPLIT[world])) for each in per_rank if i < len(each)]


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def plan_from_data(rank, world):
    graph = sec.trace(net(), torch.zeros(1, 8), variants=False)
    found = {}
    for kind in (sec.Activation, sec.Reconstruction):
        made = sec.plan(graph, sec.Macs(0.5), importance=kind(data(rank, SPLIT[world][rank])))
        with alone():
            single = sec.plan(graph, sec.Macs(0.5), importance=kind(dealt(world)))
            own = sec.plan(graph, sec.Macs(0.5), importance=kind(data(rank, 1)))
        found[kind.__name__] = [made == single, made == own]
    return found


def compress(rank, world):
    model, single = net(), net()
    sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), data(rank, SPLIT[world][rank]), timed=False)
    with alone():
        sec.compress(single, torch.zeros(1, 8), sec.Macs(0.5), dealt(world), timed=False)
    return same(state(model), state(single))


def refit(rank, world):
    model, single = net(), net()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 8)), sec.Ratio(0.5))
    sec.apply(model, plan, compensate=sec.LeastSquares(data(rank, SPLIT[world][rank])))
    with alone():
        sec.apply(single, plan, compensate=sec.LeastSquares(dealt(world)))
    return same(state(model), state(single))


def refused(call, model):
    """How a call was refused, if that left the model as it was."""
    before = state(model)
    try:
        call()
    except sec.SecateurError as error:
        return str(error) if same(before, state(model)) else "the model has changed"
    return "nothing was raised"


def other_plans(rank, world):
    model = net()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 8)), sec.Ratio(0.5), importance=sec.Random(rank))
    return refused(lambda: sec.apply(model, plan), model)


def bad_batch(rank, world):
    model = net()
    batches = data(rank, 2) if rank != 1 else [torch.randn(4, 8), torch.randn(4, 7)]
    return refused(lambda: sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), batches, timed=False), model)


def data_that_raises(rank, world):
    def batches():
        yield torch.randn(4, 8)
        if rank == 1:
            raise OSError("the disk of this rank is gone")
        yield torch.randn(4, 8)

    model = net()
    before = state(model)
    try:
        sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), batches, timed=False)
    except (OSError, sec.SecateurError) as error:
        return str(error) if same(before, state(model)) else "the model has changed"


def proof_that_fails(rank, world):
    """The last thing that can go wrong, on one rank only."""
    from secateur.pipeline import apply as room

    model, real = net(), room.check

    def check(*args):
        real(*args)
        if rank == 1:
            raise sec.VerifyError("on this rank only")

    plan = sec.plan(sec.trace(model, torch.zeros(1, 8)), sec.Ratio(0.5))
    room.check = check
    try:
        return refused(lambda: sec.apply(model, plan), model)
    finally:
        room.check = real


def other_calls(rank, world):
    model = net()
    if rank:
        return refused(lambda: sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), data(rank, 1), timed=False), model)
    plan = sec.plan(sec.trace(model, torch.zeros(1, 8)), sec.Ratio(0.5))
    return refused(lambda: sec.apply(model, plan), model)


def measured(rank, world):
    model = net()
    graph = sec.trace(model, torch.zeros(1, 8))
    return [
        refused(lambda: sec.plan(graph, sec.Latency(0.5)), model),
        refused(lambda: sec.compress(model, torch.zeros(1, 8), sec.Latency(0.5) & sec.Macs(0.9), data(0, 1)), model),
    ]


def one_rank_alone(rank, world):
    model = net()
    if rank == 0:
        with alone():
            sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), data(0, 2), timed=False)
    return model[2].in_features < 32


def ddp(rank, world):
    """Cut the wrapper: it still shares gradients and stays in step, and refuses to if one rank was cut alone."""
    wrapped = DistributedDataParallel(net())
    plan = sec.plan(sec.trace(wrapped, torch.zeros(1, 8)), sec.Ratio(0.5))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    inputs = data(rank, 3)
    wrapped(inputs[0]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sec.apply(wrapped, plan, optimizer=optimizer)
    single, again = copy.deepcopy(wrapped.module), wrapped
    again(inputs[1]).square().sum().backward()
    gradients = [param.grad.clone() for param in again.parameters()]
    optimizer.step()
    mine = []
    for other in range(world):
        single.zero_grad()
        single(data(other, 3)[1]).square().sum().backward()
        mine.append([param.grad.clone() for param in single.parameters()])
    means = [torch.stack(each).mean(0) for each in zip(*mine, strict=True)]
    right = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, means, strict=True))
    gathered = [torch.empty_like(again.module[2].weight) for _ in range(world)]
    dist.all_gather(gathered, again.module[2].weight.detach())
    with alone():
        sec.apply(wrapped, sec.plan(sec.trace(wrapped, torch.zeros(1, 8)), sec.Ratio(0.5)), optimizer=optimizer)
    stale = refused(lambda: wrapped(inputs[1]), wrapped)
    return {"stale": stale, "right": right, "in step": all(torch.equal(gathered[0], each) for each in gathered)}


def rounds(rank, folder, victim=None):
    """Cut and train in rounds, each rank with random numbers of its own; what is left, bit for bit."""
    model = net()
    torch.manual_seed(rank)

    def fit(model, step):
        if step == 2 and rank == victim:
            os._exit(9)
        wrapped = DistributedDataParallel(model.train())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()

    def evaluate(model):
        return float(model(torch.ones(1, 8)).sum()) + rank

    way = sec.schedule.linear(3)
    found = sec.iterate(
        model, torch.zeros(1, 8), sec.Macs(0.4), fit=fit, evaluate=evaluate, schedule=way, checkpoint=folder
    )
    whole = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state(model).values())).hexdigest()
    return [whole, [one.after for one in found.rounds], sorted(os.listdir(folder))]


def iterate(rank, world):
    return rounds(rank, Path(os.environ["SECATEUR_JOBS_OUT"], "rounds"))


def iterate_killed(rank, world):
    return rounds(rank, os.environ["SECATEUR_JOBS_FOLDER"], victim=1)


def iterate_resumed(rank, world):
    return rounds(rank, os.environ["SECATEUR_JOBS_FOLDER"])


def killed(rank, world):
    """The last rank stops in the middle of its data, without a word."""
    meeting._SILENCE = 3.0

    def batches():
        yield torch.randn(4, 8)
        if rank == world - 1:
            os._exit(9)
        yield torch.randn(4, 8)

    model, begun = net(), time.monotonic()
    said = refused(lambda: sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), batches, timed=False), model)
    return [said, time.monotonic() - begun]
