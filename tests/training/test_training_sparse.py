"""Masks that move during training: counts, which weights, the optimizer's state, resuming, processes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sec
from secateur import prune, training
from secateur.sparse.patterns import NM, Block
from secateur.training.dynamic import Layer


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 8)
    )


def batches(n, seed=1):
    chance = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(8, 4, 6, 6, generator=chance)
        yield x, x.mean((2, 3)).repeat(1, 2)


def train(model, optimizer, steps, first=0):
    for i, (x, y) in enumerate(batches(steps)):
        if i >= first:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2)


def alive(model):
    return {name: buffer.bool().clone() for name, buffer in model.named_buffers() if name.endswith("_mask")}


METHODS = [
    training.Static(0.9),
    training.SET(0.9, every=3, end=20),
    training.RigL(0.9, every=3, end=20),
    training.RigL(0.9, training.Uniform(), every=3, end=20),
    training.GMP(0.9, begin=2, end=14, every=3),
    training.GMP(NM(2, 4), begin=2, end=14, every=3),
    training.GMP(Block(4, 1, 0.75), begin=2, end=14, every=3),
    training.SRSTE(NM(1, 4)),
    training.Movement(0.9, begin=2, end=14, every=3),
    training.Rewinding(0.9, rounds=3, every=5, to=2),
]
NAMES = [f"{type(m).__name__}-{i}" for i, m in enumerate(METHODS)]


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_every_method_ends_as_sparse_as_was_asked(method):
    model = net()
    optimizer = adam(model)
    sparse = training.SparseTraining(model, optimizer, method)
    train(model, optimizer, 20)
    wanted = getattr(method, "sparsity", None) or getattr(method.pattern, "sparsity", method.pattern)
    assert sparse.sparsity == pytest.approx(wanted, abs=0.01)
    mask, x = alive(model)["0.weight_mask"], next(batches(1))[0]
    before = model.eval()(x)
    finished = sparse.finish()
    assert finished is model
    assert not prune.is_pruned(model)
    assert torch.equal(finished[0].weight != 0, mask)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net().named_parameters()]
    assert torch.equal(model(x), before)
    taken = sparse.step
    train(model, optimizer, 1)
    assert sparse.step == taken  # it is over


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(method):
    whole = net()
    optimizer = adam(whole)
    sparse = training.SparseTraining(whole, optimizer, method)
    train(whole, optimizer, 10)
    state = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), sparse.state_dict()))
    train(whole, optimizer, 18, first=10)

    again = net(seed=7)
    fresh = adam(again)
    resumed = training.SparseTraining(again, fresh, method, seed=3)
    for thing, held in zip((again, fresh, resumed), state, strict=True):
        thing.load_state_dict(held)
    train(again, fresh, 18, first=10)
    assert resumed.step == sparse.step
    for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_rigl_grows_where_the_dense_gradient_is_largest():
    """The oracle makes its own dense gradient: a model without masks that has the masked weights as its own."""
    method = training.RigL(0.8, training.Uniform(), every=1, end=100, drop=0.3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    training.SparseTraining(model, optimizer, method)
    plain, (x, y) = net(), next(batches(1))
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight_orig * model[0].weight_mask)
        plain[5].weight.copy_(model[5].weight_orig * model[5].weight_mask)
    F.mse_loss(plain(x), y).backward()
    before = alive(model)["0.weight_mask"]
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    after = alive(model)["0.weight_mask"]
    grown = after & ~before
    count = int(grown.sum())
    assert count == round(method.replaced(1) * int(before.sum()))
    wanted = plain[0].weight.grad.abs().masked_fill(before, 0).flatten().topk(count).indices
    assert set(wanted.tolist()) == set(grown.flatten().nonzero().flatten().tolist())
    gone = before & ~after
    weights = model[0].weight_orig.detach()
    assert weights[grown].eq(0).all()
    kept = before & after
    with torch.no_grad():  # SGD moved each weight by its rate times its gradient
        moved = (plain[0].weight - 1e-3 * plain[0].weight.grad).abs()
    assert moved[gone].max() <= moved[kept].min()


def test_gradual_pruning_goes_as_the_cube_and_nothing_comes_back():
    model = net()
    optimizer = adam(model)
    sparse = training.SparseTraining(model, optimizer, training.GMP(0.8, begin=2, end=10, every=4))
    seen, masks = [], alive(model)
    for i in range(12):
        train(model, optimizer, i + 1, first=i)
        seen.append(sparse.sparsity)
        now = alive(model)
        assert not any(bool((now[name] & ~masks[name]).any()) for name in now)
        masks = now
    wanted = [0.0] * 5 + [0.8 * (1 - 0.5**3)] * 4 + [0.8] * 3  # half of the way at step 6
    assert seen == pytest.approx(wanted, abs=0.01)


def test_set_grows_anywhere_at_random():
    method, chance = training.SET(0.5, every=1, end=10**6, drop=0.25), torch.Generator().manual_seed(0)
    mask = (torch.arange(16) % 2 == 0).view(4, 4)
    layer = Layer("0.weight", torch.arange(1.0, 17.0).view(4, 4), mask)
    grown = torch.zeros(16)
    for _ in range(200):
        (after,) = method.change([layer], 1, chance)
        assert int((mask & ~after).sum()) == 2
        assert not (after & mask)[0, 0]  # the smallest goes
        grown += (after & ~mask).flatten()
    assert grown[::2].eq(0).all()
    assert grown[1::2].min() > 25  # each 50 times, by chance


def test_gradients_add_up_over_several_backward_passes():
    found = {}
    for parts in (1, 4):
        model = net()
        model[1] = nn.Identity()  # statistics of a batch would differ
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        training.SparseTraining(model, optimizer, training.RigL(0.8, every=1, end=100))
        x, y = next(batches(1))
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.mse_loss(model(a), b) / parts).backward()
        optimizer.step()
        found[parts] = alive(model)
    assert all(torch.equal(found[1][name], found[4][name]) for name in found[1])


def test_the_optimizer_forgets_weights_that_go_or_come():
    model = net()
    optimizer = adam(model)
    training.SparseTraining(model, optimizer, training.SET(0.8, every=4, end=100))
    train(model, optimizer, 3)
    before = alive(model)["0.weight_mask"]
    train(model, optimizer, 4, first=3)
    changed = alive(model)["0.weight_mask"] != before
    state = optimizer.state[model[0].weight_orig]
    assert changed.any()
    assert state["exp_avg"][changed].eq(0).all()
    assert state["exp_avg_sq"][changed].eq(0).all()
    assert state["exp_avg"][before & ~changed].ne(0).any()


def test_sr_ste_is_the_formula():
    """grad = dense gradient + decay · what is masked."""
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, -3.0, 2.0, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training.SparseTraining(model, optimizer, training.SRSTE(NM(2, 4), decay=0.5))
    assert model.weight.tolist() == [[0, 0, 3, 4], [4, -3, 0, 0]]
    model(torch.ones(1, 4)).sum().backward()  # the gradient is 1 everywhere
    optimizer.step()
    wanted = torch.tensor([[1 - 0.1 * 1.5, 2 - 0.1 * 2.0, 2.9, 3.9], [3.9, -3.1, 2 - 0.1 * 2.0, 1 - 0.1 * 1.5]])
    assert torch.allclose(model.weight_orig, wanted)


def test_movement_ranks_by_what_training_makes_larger():
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[5.0, 1.0, 5.0, 1.0]]))  # by size it would be the others
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sparse = training.SparseTraining(model, optimizer, training.Movement(0.5, begin=0, end=3, every=3))
    signs = torch.tensor([[1.0, -1.0, 2.0, -2.0]])  # the gradients: 1 and 3 shrink, 2 and 4 grow
    for _ in range(3):
        optimizer.zero_grad()
        model(signs).sum().backward()
        optimizer.step()
    assert model.weight_mask.tolist() == [[0, 1, 0, 1]]
    assert sparse.step == 3


def test_rewinding_comes_back_to_what_was():
    model = net()
    optimizer = adam(model)
    training.SparseTraining(model, optimizer, training.Rewinding(0.5, rounds=1, every=3, to=2))
    train(model, optimizer, 2)
    there = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 5, first=2)
    assert all(torch.equal(p, there[name]) for name, p in model.named_parameters())
    assert all(state["exp_avg"].eq(0).all() for state in optimizer.state.values())


def test_distributions():
    shapes = [(16, 4, 3, 3), (64, 64, 3, 3), (10, 64)]
    for distribution in (training.ERK(), training.Uniform()):
        counts = distribution.counts(shapes, 0.9)
        total = sum(math.prod(shape) for shape in shapes)
        assert sum(counts) == pytest.approx(0.1 * total, abs=3)
    dense = training.ERK().densities(shapes, 0.9)
    assert dense[1] < dense[0] <= 1
    assert training.ERK().densities([(2, 2), (100, 100)], 0.5)[0] == 1.0  # a small layer stays whole


def test_bad_input_changes_nothing():
    model = net()
    optimizer = adam(model)
    before, hooks = copy.deepcopy(model.state_dict()), len(optimizer._optimizer_step_pre_hooks)
    for bad, match in [
        ({"optimizer": adam(net())}, "does not have 0.weight among its parameters"),
        ({"optimizer": 3}, "an optimizer is"),
        ({"method": "RigL"}, "method is RigL"),
        ({"only": "nonsense"}, "no parameter goes by 'nonsense'"),
        ({"protect": ("0", "5")}, "no linear layer and no convolution"),
        ({"method": training.SRSTE(NM(2, 3))}, r"0.weight: its 4 inputs are no multiple of 3; protect it"),
    ]:
        given = {"optimizer": optimizer, "method": training.RigL(0.9), **bad}
        with pytest.raises(sec.TrainingError, match=match):
            training.SparseTraining(model, given.pop("optimizer"), given.pop("method"), **given)
    for make, match in [
        (lambda: training.GMP(0.9, begin=10, end=10), "end at step 10, before it begins at step 10"),
        (lambda: training.Movement(0.9, begin=10, end=5), "before it begins"),
        (lambda: training.RigL(1.0), "from 0 to below 1"),
        (lambda: training.SET(0.9, drop=2), "from 0 to below 1"),
        (lambda: training.SET(0.9, every=0), "from 1 on"),
        (lambda: training.Rewinding(0.9, rounds=0), "from 1 on"),
        (lambda: training.SRSTE(decay=-1), "decay is a number"),
    ]:
        with pytest.raises(sec.TrainingError, match=match):
            make()
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    with pytest.raises(sec.TrainingError, match=r"0\.weight is shared by 2 layers"):
        training.SparseTraining(shared, adam(shared), training.RigL(0.9))
    sick = nn.Linear(2, 2)
    with torch.no_grad():
        sick.weight[0, 0] = math.nan
    with pytest.raises(sec.TrainingError, match="weight holds NaN"):
        training.SparseTraining(sick, adam(sick), training.RigL(0.5))
    masked = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    with pytest.raises(sec.TrainingError, match="has a mask already"):
        training.SparseTraining(masked, adam(masked), training.RigL(0.5))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    sparse = training.SparseTraining(model, optimizer, training.RigL(0.9))
    with pytest.raises(sec.TrainingError, match="no state of sparse training"):
        sparse.load_state_dict({})


def test_a_loss_that_is_no_number_is_said_before_masks_change():
    model = net()
    optimizer = adam(model)
    training.SparseTraining(model, optimizer, training.RigL(0.9, every=2, end=10))
    train(model, optimizer, 1)
    before = alive(model)
    optimizer.zero_grad()
    (model(next(batches(1))[0]).sum() * math.nan).backward()
    with pytest.raises(sec.TrainingError, match="holds NaN or infinity after step 2"):
        optimizer.step()
    assert all(torch.equal(mask, before[name]) for name, mask in alive(model).items())


@pytest.mark.parametrize("method", [training.SRSTE(NM(1, 4)), training.Movement(0.5, begin=0, end=9, every=3)])
def test_gradients_that_are_scaled_before_the_step(method):
    """What a GradScaler and clipping do: the loss times 1024, the gradients divided by it, then made shorter."""
    found = []
    for scale in (1.0, 1024.0):
        model = net()
        model[1] = nn.Identity()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        training.SparseTraining(model, optimizer, method)
        for x, y in batches(4):
            optimizer.zero_grad()
            (scale * F.mse_loss(model(x), y)).backward()
            for p in model.parameters():
                p.grad.div_(scale)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        found.append((model[0].weight_orig.detach().clone(), model[0].weight_mask.clone()))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.equal(found[0][1], found[1][1])


def test_copies_of_a_model_in_training():
    model = net()
    optimizer = adam(model)
    sparse = training.SparseTraining(model, optimizer, training.RigL(0.9, every=2, end=20))
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    x = next(batches(1))[0]
    assert torch.equal(other.eval()(x), model.eval()(x))
    before = alive(other)
    train(model.train(), optimizer, 6, first=3)
    assert all(torch.equal(mask, before[name]) for name, mask in alive(other).items())
    other.train()(x).sum().backward()
    assert all(layer.gradient is None for layer in sparse._layers)  # what the copy does is no matter of the model's


def test_mixed_precision_and_compiled_models():
    model = net()
    optimizer = adam(model)
    sparse = training.SparseTraining(model, optimizer, training.RigL(0.9, every=2, end=10))
    for x, y in batches(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
    assert sparse.sparsity == pytest.approx(0.9, abs=0.01)
    compiled = torch.compile(net(), backend="eager")
    optimizer = adam(compiled)
    sparse = training.SparseTraining(compiled, optimizer, training.RigL(0.9, every=2, end=10))
    before = alive(sparse.model)
    train(compiled, optimizer, 4)
    assert any(not torch.equal(mask, before[name]) for name, mask in alive(sparse.model).items())


def _process(rank, folder):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    training.SparseTraining(model, optimizer, training.RigL(0.9, every=2, end=20))
    for i, (x, y) in enumerate(batches(12)):
        if i % 2 == rank:  # each process has batches of its own
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    torch.save(alive(model.module), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_processes_that_train_together_have_the_same_masks(tmp_path):
    torch.multiprocessing.start_processes(_process, (str(tmp_path),), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = net()
    training.SparseTraining(start, adam(start), training.RigL(0.9, every=2, end=20))
    assert any(not torch.equal(mask, first[name]) for name, mask in alive(start).items())


def test_masks_follow_where_the_buffers_are_replaced():
    """As `model.to(…)` and accelerate's `prepare` do."""
    found = []
    for replaced in (False, True):
        model = net()
        optimizer = adam(model)
        sparse = training.SparseTraining(model, optimizer, training.SET(0.8, every=2, end=50))
        for module in model.modules() if replaced else ():
            module._buffers.update({name: buffer.clone() for name, buffer in module._buffers.items()})
        begun = alive(model)
        train(model, optimizer, 6)
        assert any(not torch.equal(begun[name], mask) for name, mask in alive(model).items())
        found.append({**model.state_dict(), "zeros": torch.tensor(sparse.sparsity)})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
