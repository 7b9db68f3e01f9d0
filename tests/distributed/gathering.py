"""Data on models that are spread over ranks, each of which has a part; jobs that `test_sharding.py` asks for."""

import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from sharding import IDS, distance, in_parallel, llama, mlp, net, out, per_layer, train, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module

import secateur as sec
from secateur.distributed import alone


def own(rank, world, make_batches):
    """The batches of this rank, and those of all in the order in which one process has them."""
    every = [make_batches(rank, turn) for turn in range(2) for rank in range(world)]
    return every[rank::world], every


def rows(rank, turn):
    return torch.randn(24 + rank, 8, generator=torch.Generator().manual_seed(10 * turn + rank))


def texts(rank, turn):
    return {"input_ids": torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(10 * turn + rank))}


def squares(model, batch):
    made = model(batch)
    return (made.logits if hasattr(made, "logits") else made).square().mean()


CRITERIA = {
    "Activation": sec.Activation,
    "Wanda": sec.Wanda,
    "Reconstruction": sec.Reconstruction,
    "Taylor": lambda batches: sec.Taylor(batches, squares),
    "Sum": lambda batches: sec.Magnitude() + sec.Activation(batches),
}


def with_data(make, shard, example, batches, criteria):
    """Criteria with data, `compress` and a refit of a sharded model, beside one process with all the data."""

    def job(rank, world):
        mine, every = own(rank, world, batches)
        model = make()
        shard(model)
        before, plans = whole(model), {}
        graph = sec.trace(model, example, variants=False)
        with alone():
            single = sec.trace(make(), example, variants=False)
        for name in criteria:
            plan = sec.plan(graph, sec.Ratio(0.5), importance=CRITERIA[name](mine), round_to=world)
            with alone():
                want = sec.plan(single, sec.Ratio(0.5), importance=CRITERIA[name](every), round_to=world)
            plans[name] = bool(plan.axes) and plan.kept == want.kept
        found = {"plans": plans, "same": distance(whole(model), before)}
        found |= compressed(model, make(), shard, make, example, mine, every)
        return found | refitted(make, shard, mine, every, plan)

    return job


data_fsdp = with_data(net, per_layer, torch.zeros(2, 8), rows, ("Activation", "Taylor", "Sum"))
data_parallel = with_data(mlp, in_parallel, torch.zeros(2, 8), rows, ("Wanda", "Reconstruction"))
data_tied = with_data(partial(llama, tie_word_embeddings=True), per_layer, IDS, texts, ("Reconstruction",))


def compressed(model, single, shard, make, example, mine, every):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"round_to": dist.get_world_size(), "timed": False}
    made = sec.compress(model, example, sec.Params(0.6), mine, shard=shard, **options)
    with alone():
        want = sec.compress(single, example, sec.Params(0.6), every, verify=False, **options)
    found = {"compressed": distance(whole(model), single.state_dict()), "one plan": made.plan.kept == want.plan.kept}
    found["sharded"] = sum(isinstance(param, DTensor) for param in model.parameters())
    found["ties"] = len(dict(model.named_parameters())) == len(dict(single.named_parameters()))
    found["out"] = float((out(model, example) - out(single, example)).abs().max())
    try:
        other.step()
    except sec.ApplyError as error:
        found["other"] = str(error)
    path = Path(os.environ["SECATEUR_JOBS_OUT"], "compressed.safetensors")
    sec.save(model, path)
    with alone():
        found["saved"] = distance(sec.load(path, make()).state_dict(), whole(model))
    for each in (model, single):
        train(each, torch.optim.SGD(each.parameters(), lr=0.01), every[:1])
    found["trained"] = distance(whole(model), single.state_dict())
    return found


def refitted(make, shard, mine, every, plan):
    """`apply` with a refit and an optimizer, whose state is cut along."""
    model, single = make(), make()
    shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, single)]
    for each, optimizer in zip((model, single), optimizers, strict=True):
        train(each, optimizer, every[:1])
    sec.apply(model, plan, shard=shard, optimizer=optimizers[0], compensate=sec.LeastSquares(mine))
    with alone():
        sec.apply(single, plan, optimizer=optimizers[1], compensate=sec.LeastSquares(every), verify=False)
    found = {"refitted": distance(whole(model), single.state_dict()), "outcome": sec.outcome(model) is not None}
    for each, optimizer in zip((model, single), optimizers, strict=True):
        train(each, optimizer, every[:1])
    found["state"] = distance(whole(model), single.state_dict())
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


def tower():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), Block(), nn.Linear(16, 4))


def each_block(model):
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x):
        return self.down(torch.relu(self.up(x) + self.shift))


def replicated_buffer():
    """A buffer that every rank has, as a tensor of the mesh, is cut with its values."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Shifted()
    distribute_module(model, mesh)
    plan = sec.plan(sec.trace(model, torch.zeros(2, 8)), sec.Ratio(0.5))
    sec.apply(model, plan, shard=lambda model: distribute_module(model, mesh))
    return model.shift.to_local().tolist() == [float(at) for at in plan.kept["shift"][0]]


def measured_sharded(rank, world):
    """Rank 0 times the whole model; all have its plan, and what `compress` makes of it."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    each_block(model)
    example, batches = torch.zeros(256, 64), [torch.randn(64, 64)]
    plan = sec.plan(sec.trace(model, example), sec.Latency(0.8))
    report = sec.compress(model, example, sec.Latency(0.8), batches, shard=each_block, timed=False)
    spread = sum(isinstance(param, DTensor) for param in model.parameters())
    return [plan.to_json(), bool(plan.axes), report.plan.to_json(), spread]


def other_jobs(rank, world):
    """Sweeps, zeros, and blocks that go with an optimizer."""
    mine, every = own(rank, world, rows)
    models = tower(), tower()
    each_block(models[0])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    found = []
    for model, optimizer, data, shard in zip(models, optimizers, (mine, every), (each_block, None), strict=True):
        with alone() if shard is None else nullcontext():
            train(model, optimizer, every[:1])
            swept = sec.sweep(model, every[0], targets=[sec.Macs(0.7)], batches=data, axis_ratio=None)
            plan = sec.plan_depth(sec.trace(model, every[0]), 1, data)
            sec.apply(model, plan, optimizer=optimizer, shard=shard)
            train(model, optimizer, every[:1])
            sec.sparsify(model, data, sec.NM(2, 4), shard=shard)
            found.append((swept.curve[0].metric, plan.removed.blocks, whole(model)))
    one, other = found
    dead = net()
    for tensor in dead.mid.parameters():
        tensor.data[:4] = 0
    per_layer(dead)
    return {
        "buffer": replicated_buffer(),
        "dead": [axis.keep for axis in sec.plan(sec.trace(dead, every[0]), sec.Zeros()).axes] == [tuple(range(4, 32))],
        "swept": abs(one[0] - other[0]),
        "blocks": one[1] == other[1] and len(models[0]) == 4,
        "state": distance(one[2], other[2]),
        "zeros": int((one[2]["2.inner.weight"] == 0).sum()),
        "sharded": sum(isinstance(param, DTensor) for param in models[0].parameters()),
    }


def killed_sharded(rank, world):
    """The last rank is gone while the model is put together: the others have their shards as they were."""
    model = net()

    def stop(_, inputs):
        if rank == world - 1 and len(inputs[0]) > 20:  # with data, not with the example
            os._exit(9)

    model.register_forward_pre_hook(stop)
    per_layer(model)
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    begun = time.monotonic()
    try:
        sec.compress(model, torch.zeros(2, 8), sec.Macs(0.5), own(rank, world, rows)[0], timed=False, shard=per_layer)
    except sec.SecateurError as error:
        said = str(error)
    same = all(torch.equal(param.to_local(), before[name]) for name, param in model.named_parameters())
    return {"said": said, "seconds": time.monotonic() - begun, "same": same and type(model).__name__ == "FSDPNet"}
