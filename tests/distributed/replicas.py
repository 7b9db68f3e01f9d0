"""What a rank does with a model that every rank has; the jobs that `test_replicas.py` asks for."""

import copy
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import secateur as sec
from secateur.compat import default_store
from secateur.distributed import alone

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


class Runs:
    """Which batches a model, and each copy of it, was run on; kept by name, as copies share no lists."""

    seen: ClassVar[set[float]] = set()

    def __init__(self, *models):
        Runs.seen = set()
        for model in models:
            model.register_forward_pre_hook(note_batch)

    @staticmethod
    def of(batches):
        return {float(batch.double().sum()) for batch in batches}


def note_batch(_, inputs):
    if not isinstance(inputs[0], torch._subclasses.FakeTensor) and len(inputs[0]) > 15:
        Runs.seen.add(float(inputs[0].detach().double().sum()))


def only_own(rank, world):
    """Whether the batches that were run are those of this rank and the first, and all of these."""
    want = Runs.of(data(rank, SPLIT[world][rank])) | Runs.of(dealt(world)[:1])
    return want == Runs.seen


def near(a, b):
    """The largest difference, and the bits of the first as a digest."""
    digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in a.values())).hexdigest()
    return max(float((a[name] - b[name]).abs().max()) for name in a), digest


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
    pairs = {n: [(batch, batch[:, :4]) for batch in data(n, SPLIT[world][n])] for n in range(world)}
    every = [pairs[n][i] for i in range(max(SPLIT[world])) for n in range(world) if i < len(pairs[n])]
    for kind in (sec.Taylor, sec.Hessian):
        made = sec.plan(graph, sec.Macs(0.5), importance=kind(pairs[rank], nn.functional.mse_loss))
        with alone():
            single = sec.plan(graph, sec.Macs(0.5), importance=kind(every, nn.functional.mse_loss))
        found[kind.__name__] = [made == single, False]
    return found


def compress(rank, world):
    model, single = net(), net()
    Runs(model)
    made = sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), data(rank, SPLIT[world][rank]), timed=False)
    own = only_own(rank, world)
    with alone():
        want = sec.compress(single, torch.zeros(1, 8), sec.Macs(0.5), dealt(world), timed=False)
    off, digest = near(state(model), state(single))
    return {"plan": made.plan.kept == want.plan.kept, "off": off, "digest": digest, "own": own}


def refit(rank, world):
    model, single = net(), net()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 8)), sec.Ratio(0.5))
    Runs(model)
    sec.apply(model, plan, compensate=sec.LeastSquares(data(rank, SPLIT[world][rank])))
    own = only_own(rank, world)
    with alone():
        sec.apply(single, plan, compensate=sec.LeastSquares(dealt(world)))
    off, digest = near(state(model), state(single))
    return {"plan": True, "off": off, "digest": digest, "own": own}


class Routed(nn.Module):
    """Each batch goes to two experts of its own, one layer is used twice, and there is a norm with statistics."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x):
        which = int(x[0].abs().sum() * 1000) % 4
        x = x @ self.experts[which] + x @ self.experts[which - 1]
        x = self.down(torch.relu(self.norm(self.up(x))))
        return self.down(torch.relu(self.up(x)))


def routed(rank, world):
    torch.manual_seed(4)
    model = Routed().eval()
    single = copy.deepcopy(model)
    with alone():
        plan = sec.plan(sec.trace(model, torch.zeros(2, 8)), sec.Ratio(0.5), protect=("experts",))
    own = data(rank, SPLIT[world][rank])
    graph = sec.trace(model, torch.zeros(2, 8))
    criteria = [kind(own) for kind in (sec.Activation, sec.Reconstruction)]
    plans = [sec.plan(graph, sec.Ratio(0.5), importance=one) for one in criteria]
    with alone():
        criteria = [kind(dealt(world)) for kind in (sec.Activation, sec.Reconstruction)]
        alike = plans == [sec.plan(graph, sec.Ratio(0.5), importance=one) for one in criteria]
    sec.apply(model, plan, compensate=sec.LeastSquares(own))
    with alone():
        sec.apply(single, plan, compensate=sec.LeastSquares(dealt(world)))
    off, digest = near(state(model), state(single))
    return {"plan": alike, "off": off, "digest": digest, "own": True}


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


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.inner(x)


def measured(rank, world):
    """Rank 0 measures for all: nobody else runs a clock, and all have its plan, whatever leads to it."""
    from secateur.timing import measure

    def not_here(*_):
        raise AssertionError("another rank measures")

    torch.manual_seed(5)
    make = nn.Sequential(Residual(), Residual(), nn.Linear(64, 4)).eval()
    batches = [torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
    example, real, found = torch.zeros(512, 64), measure._in_turns, {}
    measure._in_turns, measure._MOST = not_here if rank else real, measure._FEWEST  # so that it is soon done
    try:
        graph = sec.trace(make, example)
        plan = sec.plan(graph, sec.Latency(0.8) & sec.Macs(0.9), importance=sec.Activation(batches))
        found["plan"] = [plan.to_json(), str(plan.confirmation), bool(plan.axes)]
        swept = sec.sweep(make, example, targets=[sec.Latency(0.8)], axis_ratio=None)
        found["sweep"] = swept.curve[0].macs
        for name, more in (("compress", {}), ("blocks", {"blocks": 1})):
            model = copy.deepcopy(make)
            report = sec.compress(model, example, sec.Latency(0.8), batches, timed=not more, **more)
            times = [time.median for time in report.latency or ()]
            removed = list(report.plan.removed.blocks)
            found[name] = [report.plan.to_json(), near(state(model), state(model))[1], times, removed]
        other = nn.Linear(64, 4) if rank else nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
        found["another"] = refused(lambda: sec.plan(sec.trace(other, example), sec.Latency(0.5)), other)
    finally:
        measure._in_turns = real
    return found


def measured_on_one_rank_fails(rank, world):
    """What fails while rank 0 measures is raised on all."""
    model = net()
    graph = sec.trace(model, torch.zeros(1, 8))
    if rank == 0:
        model.register_forward_pre_hook(lambda *_: 1 / 0)
    return refused(lambda: sec.plan(graph, sec.Latency(0.5)), model)


def factor_fails(rank, world):
    """After the work, on one rank only: the others have not been changed either."""
    from secateur.pipeline import factor as room

    model, real = net(), room.remember

    def remember(*args):
        real(*args)
        if rank == 1:
            raise sec.VerifyError("on this rank only")

    room.remember = remember
    try:
        said = refused(lambda: sec.factor(model, ["2"], data(rank, 2)), model)
    finally:
        room.remember = real
    return [said, type(model[2]).__name__]


def one_rank_alone(rank, world):
    model = net()
    if rank == 0:
        with alone():
            sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), data(0, 2), timed=False)
    return model[2].in_features < 32


def ddp(rank, world):
    """Cut the wrapper, or the model inside."""
    return [cut_replica(rank, world, part) for part in (lambda wrapped: wrapped, lambda wrapped: wrapped.module)]


def cut_replica(rank, world, part):
    """It still shares gradients and stays in step, with the same parameters, and refuses to if one rank was cut
    alone."""
    wrapped = DistributedDataParallel(net())
    objects = list(map(id, wrapped.parameters()))
    plan = sec.plan(sec.trace(wrapped, torch.zeros(1, 8)), sec.Ratio(0.5))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    inputs = data(rank, 3)
    wrapped(inputs[0]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sec.apply(part(wrapped), plan, optimizer=optimizer)
    kept = objects == list(map(id, wrapped.parameters()))
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
    in_step = all(torch.equal(gathered[0], each) for each in gathered)
    return {"stale": stale, "right": right, "in step": in_step, "kept": kept}


def ddp_compressed(rank, world):
    """Each rank does the whole with the data of all (`joint=`), and they go on sharing gradients."""
    wrapped = DistributedDataParallel(net())
    sec.compress(wrapped, torch.zeros(1, 8), sec.Macs(0.5), data(rank, 2), joint=2, timed=False)
    wrapped(data(rank, 1)[0]).square().sum().backward()
    own = wrapped.module[2].weight.grad
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    return [list(own.shape), all(torch.equal(own, each) for each in gathered)]


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

    def batches():
        yield torch.randn(4, 8)
        if rank == world - 1:
            os._exit(9)
        yield torch.randn(4, 8)

    model, begun = net(), time.monotonic()
    said = refused(lambda: sec.compress(model, torch.zeros(1, 8), sec.Macs(0.5), batches, timed=False), model)
    return [said, time.monotonic() - begun]


def first_killed(rank, world):
    """Rank 0, which has the store that all meet at, stops without a word."""
    model, begun = net(), time.monotonic()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 8), variants=False), sec.Ratio(0.5))
    if rank == 0:
        os._exit(9)
    return [refused(lambda: sec.apply(model, plan), model), time.monotonic() - begun]


def raised_elsewhere(rank, world):
    """The last rank ends with an error of the user's after it has traced, where no other rank is waited for."""
    model, begun = net(), time.monotonic()
    graph = sec.trace(model, torch.zeros(1, 8), variants=False)
    if rank == world - 1:
        os._exit(1)
    return [refused(lambda: sec.apply(model, sec.plan(graph, sec.Ratio(0.5))), model), time.monotonic() - begun]


def absent(rank, world):
    """The last rank is gone before it called anything: the others wait as long as the process group would."""
    if rank == world - 1:
        os._exit(9)
    default_store().set_timeout(timedelta(seconds=3))
    model, begun = net(), time.monotonic()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 8), variants=False), sec.Ratio(0.5))
    return [refused(lambda: sec.apply(model, plan), model), time.monotonic() - begun]
