"""What a rank does with a model that is spread over ranks; the jobs that `test_sharding.py` asks for."""

import copy
import gc
import os
import threading
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import secateur as sec
from secateur.distributed import alone

IDS = {"input_ids": torch.arange(6)[None]}


def llama(**more):
    import_module("torchvision_ops")  # lets Transformers import torchvision beside a CPU build of torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, **heads, **more)
    return LlamaForCausalLM(config).eval()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.mid, self.down = (
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.Linear(32, 32),
            nn.Linear(32, 4),
        )
        self.register_buffer("offset", torch.rand(32), persistent=False)

    def forward(self, x):
        return self.down(torch.relu(self.mid(torch.relu(self.norm(self.up(x)) + self.offset))))


def net():
    torch.manual_seed(2)
    return Net().eval()


def per_layer(model):
    for layer in getattr(getattr(model, "model", model), "layers", None) or [model.up, model.mid]:
        fully_shard(layer)
    fully_shard(model)


def whole(model):
    """The state of a sharded model, put together on every rank."""
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in model.state_dict().items()}


def distance(a, b):
    assert a.keys() == b.keys()
    assert all(a[name].shape == b[name].shape for name in a)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def out(model, example):
    with torch.no_grad():
        made = model(**example) if isinstance(example, dict) else model(example)
    made = made.logits if hasattr(made, "logits") else made
    return made.full_tensor() if isinstance(made, DTensor) else made


def train(model, optimizer, batches):
    for batch in batches:
        made = model(**batch) if isinstance(batch, dict) else model(batch)
        (made.logits if hasattr(made, "logits") else made).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_torch_alone(rank, world):
    """How far training on ranks is from training in one process, with nothing of this library."""
    model, single = net(), net()
    per_layer(model)
    for each in (model, single):
        train(each, torch.optim.SGD(each.parameters(), lr=0.01), BATCHES)
    return distance(whole(model), single.state_dict())


def reference(make, example, batches, target, **more):
    """The same on one process."""
    with alone():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, batches[:1])
        plan = sec.plan(sec.trace(model, example, variants=False), target, **more)
        sec.apply(model, plan, optimizer=optimizer, verify=False)
        cut = copy.deepcopy(model.state_dict()), out(model, example)
        train(model, optimizer, batches[1:])
    return plan, cut, model.state_dict()


def cut(name, make, shard, example, batches, **more):
    """Trace, plan, cut and train a sharded model; how far it is from one process at each step."""
    target = sec.Ratio(0.5)
    plan, (state, put), trained = reference(make, example, batches, target, **more)
    model = make()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, batches[:1])
    out(model, example)  # leaves the root of FSDP2 with whole parameters
    before = {name: type(module) for name, module in model.named_modules()}
    made = sec.plan(sec.trace(model, example, variants=False), target, **more)
    kinds = {name: type(module) for name, module in model.named_modules()} == before
    other = torch.optim.SGD(model.parameters(), lr=0.1)  # one that is not passed
    sec.apply(model, made, shard=shard, optimizer=optimizer)
    found = {"plan": made.kept == plan.kept, "kinds": kinds, "cut": distance(whole(model), state)}
    found["sharded"] = sum(isinstance(param, DTensor) for param in model.parameters())
    found["out"] = float((out(model, example) - put).abs().max())
    try:
        other.step()
    except sec.ApplyError as error:
        found["other"] = str(error)
    train(model, optimizer, batches[1:])
    found["trained"] = distance(whole(model), trained)
    found["ties"] = len(dict(model.named_parameters())) == len(dict(make().named_parameters()))
    path = Path(os.environ["SECATEUR_JOBS_OUT"], f"{name}.safetensors")
    sec.save(model, path)
    with alone():
        found["saved"] = distance(sec.load(path, make()).state_dict(), whole(model))
    return found


BATCHES = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def fsdp_net(rank, world):
    return cut("net", net, fully_shard, torch.zeros(2, 8), BATCHES)


def fsdp_llama(rank, world):
    return cut("llama", partial(llama, tie_word_embeddings=True), per_layer, IDS, [IDS, IDS, IDS])


def in_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "mid": RowwiseParallel()})


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.relu(self.mid(torch.relu(self.up(x)))))


def mlp():
    torch.manual_seed(3)
    return Mlp()


def tensor_parallel(rank, world):
    return cut("mlp", mlp, in_parallel, torch.zeros(2, 8), BATCHES, round_to=world)


def one_rank(call):
    with alone():
        call()


def refusals(rank, world):
    """What does not work says so on every rank, and leaves the model as it was."""

    def failing(model):
        per_layer(model)
        _ = 1 / (rank - 1)

    def adding(model):
        per_layer(model)
        model.more = nn.Linear(2, 2)

    def metric(model):
        return 1 / (rank - 1)

    plain = net()
    plan = sec.plan(sec.trace(plain, torch.zeros(2, 8)), sec.Ratio(0.5))
    model = net()
    per_layer(model)
    graph = sec.trace(model, torch.zeros(2, 8))
    swapped = tuple(sorted(set(range(32)) - set(plan.kept["mid.weight"][1])))  # as many, and of other positions
    wrong = replace(plan, kept={**plan.kept, "mid.weight": {**plan.kept["mid.weight"], 1: swapped}})
    before, hooks = whole(model), [list(module._forward_pre_hooks) for module in model.modules()]
    flat, stage = FullyShardedDataParallel(net(), device_id="cpu"), PipelineStage(net(), rank, world, "cpu")
    calls = {
        "flat": lambda: sec.apply(flat, plan),
        "flat trace": lambda: sec.trace(flat, torch.zeros(2, 8)),
        "stage": lambda: sec.trace(stage, torch.zeros(2, 8)),
        "apply": lambda: sec.apply(model, plan),
        "compress": lambda: sec.compress(model, torch.zeros(2, 8), sec.Macs(0.5), BATCHES),
        "not in place": lambda: sec.apply(model, plan, shard=lambda m: nn.Sequential(m)),
        "fails": lambda: sec.apply(model, plan, shard=lambda m: (fully_shard(m), 1 / (rank - 1))[0]),
        "renames": lambda: sec.apply(model, plan, shard=adding),
        "wrong": lambda: sec.apply(model, wrong, shard=per_layer),
        "plain": lambda: sec.apply(net(), plan, shard=fully_shard),
        "function": lambda: sec.plan(graph, sec.Ratio(0.5), importance=lambda c: sec.Activation(BATCHES)(c)),
        "by itself": lambda: one_rank(lambda: sec.plan(graph, sec.Ratio(0.5))),
        "late": lambda: sec.compress(model, torch.zeros(2, 8), sec.Macs(0.5), BATCHES, timed=False, shard=failing),
        "metric": lambda: sec.sweep(model, torch.zeros(2, 8), metric, batches=BATCHES, axis_ratio=None),
        "recover": lambda: sec.recover(model, net(), BATCHES),
        "penalty": lambda: sec.Penalty(graph)(model),
        "sparsify": lambda: sec.sparsify(model, BATCHES, sec.NM(2, 4)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing was raised"
        except (sec.SecateurError, ZeroDivisionError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    same = distance(whole(model), before) == 0
    same &= hooks == [list(module._forward_pre_hooks) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    single = net()
    train(model, optimizer, BATCHES)
    train(single, torch.optim.SGD(single.parameters(), lr=0.1), BATCHES)
    return {"said": said, "same": same, "trains on": distance(whole(model), single.state_dict())}


def anonymous():
    """Bytes of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def memory(rank, world):
    """The most that a rank takes to cut a model and to verify it, beyond what it had."""
    wide, layers = 1024, 16  # large beside what a process takes for itself
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(wide, wide), nn.ReLU())))

    def shard(model):
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)

    shard(model)
    plan = sec.plan(sec.trace(model, torch.zeros(1, wide), variants=False), sec.Ratio(0.3), round_to=8)
    gc.collect()
    peak, done = [anonymous()] * 2, []

    def watch():
        while not done:
            peak[1] = max(peak[1], anonymous())
            time.sleep(0.001)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    sec.apply(model, plan, shard=shard)
    done.append(True)
    watching.join()
    return {"beyond": peak[1] - peak[0], "shards": layers * wide * wide * 4 // world, "largest": wide * wide * 4}
