"""Masks on weights that are spread over ranks; the jobs that `test_masking.py` asks for."""

import torch
from sharding import BATCHES, distance, in_parallel, mlp, net, out, train, whole
from torch.distributed.fsdp import fully_shard

from secateur import ao, prune
from secateur.distributed import alone


def uneven(model):
    fully_shard(model.mid)
    fully_shard(model)


def global_masks(model):
    layers = [model.up, model.mid, model.down]
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.4)
    prune.l1_unstructured(model.mid, "weight", amount=0.5)
    prune.ln_structured(model.up, "weight", amount=3, n=2, dim=0)


def removed(model):
    for layer in (model.up, model.mid, model.down):
        prune.remove(layer, "weight")


def sparsified(model):
    sparsifier = ao.WeightNormSparsifier(0.5, (1, 4), 2)
    sparsifier.prepare(model, [{"tensor_fqn": "up.weight"}, {"tensor_fqn": "mid.weight"}])
    sparsifier.step()
    return sparsifier


def halves(model):
    """Other values for all parameters, in their place, between two runs."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def reshard(model):
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def stepped(make, shard, mask, finish):
    """Mask a model, train it, look at it, change it and make the masks final; what it holds at each step."""
    model = make()
    shard(model)
    out(model, BATCHES[0])  # leaves the root of FSDP2 with whole parameters
    kept = mask(model)
    reshard(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), BATCHES)
    found = [out(model, BATCHES[0]), out(model, BATCHES[0])]
    reshard(model)
    halves(model)
    found.append(out(model, BATCHES[0]))
    finish(model, kept)
    found.append(out(model, BATCHES[0]))
    reshard(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), BATCHES)
    found.append(out(model, BATCHES[0]))
    reshard(model)
    return found, whole(model)


def compared(make, shard, mask, finish):
    with alone():
        wanted, state = stepped(make, lambda _: None, mask, finish)
    found, held = stepped(make, shard, mask, finish)
    off = [float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)]
    return {"off": off, "held": distance(held, state)}


def masks_fsdp(rank, world):
    return compared(net, uneven, global_masks, lambda model, _: removed(model))


def masked_net():
    model = net()
    global_masks(model)
    return model


def masks_first(rank, world):
    """Sharded when the masks are there."""
    return compared(masked_net, uneven, lambda _: None, lambda model, _: removed(model))


def masks_parallel(rank, world):
    return compared(mlp, in_parallel, global_masks, lambda model, _: removed(model))


def masks_sparsifier(rank, world):
    return compared(net, uneven, sparsified, lambda _, sparsifier: sparsifier.squash_mask())


def masks_same(rank, world):
    """The masks themselves."""
    with alone():
        one = net()
        global_masks(one)
    other = net()
    uneven(other)
    global_masks(other)
    masks = {name: mask for name, mask in one.state_dict().items() if "mask" in name}
    return {
        name: torch.equal(mask, other.state_dict()[name]) and bool((mask == 0).any()) for name, mask in masks.items()
    }


def masks_refused(rank, world):
    model = net()
    uneven(model)
    before = whole(model)
    torch.manual_seed(rank)
    calls = {
        "drawn": lambda: prune.random_unstructured(model.mid, "weight", amount=0.5),
        "rows": lambda: ao.SaliencyPruner({}).prepare(model, [{"tensor_fqn": "mid.weight", "sparsity_level": 0.5}]),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    out(model, BATCHES[0])
    return {"said": said, "same": distance(whole(model), before) == 0}
