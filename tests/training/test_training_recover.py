"""Learning again from the uncut model: better, never worse, resumable, and nothing else changed."""

import copy
import math
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sec
from secateur.training.checkpoint import RecoveryCheckpoint
from secateur.training.holdout import TrainingData
from secateur.training.kept import keep
from secateur.training.rounds import clearly_lower


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


def cut_pair(ratio=0.5):
    teacher = small_net().eval()
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    teacher.train()(x)  # statistics that are those of data
    teacher.eval()
    model = copy.deepcopy(teacher)
    sec.apply(model, sec.plan(sec.trace(model, x[:1]), sec.Ratio(ratio)))
    return model, teacher


def images(n=12, size=16, seed=2):
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 1, 8, 8, generator=chance) for _ in range(n)]


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def held_back(batches):
    """What `recover` holds back of batches whose rows are examples."""
    return [batch for _, batch in TrainingData(batches, by_rows=lambda batch: True).held]


def apart(model, teacher, batches):
    """Written out anew: the part of the variance of the teacher's outputs that the model misses."""
    with torch.no_grad():
        pairs = [(model.eval()(x), teacher(x)) for x in batches]
    return sum(float(((a - b) ** 2).sum() / ((b - b.mean(0)) ** 2).sum()) for a, b in pairs) / len(pairs)


def test_it_comes_closer_on_data_that_it_never_saw():
    model, teacher = cut_pair()
    fresh = images(4, seed=99)
    before, of_teacher = apart(model, teacher, fresh), state(teacher)
    found = sec.recover(model, teacher, images(), minutes=5, steps=150)
    assert apart(model, teacher, fresh) < 0.7 * before
    assert found.after < 0.7 * found.before
    assert found.after == pytest.approx(apart(model, teacher, held_back(images())), rel=1e-4)
    assert found.steps <= 150
    assert same(of_teacher, state(teacher))


def test_mixed_precision_is_for_learning_alone():
    model, teacher = cut_pair()
    seen: set[tuple[bool, torch.dtype]] = set()
    for each in (model, teacher):
        each[7].register_forward_hook(lambda _, __, out: seen.add((torch.is_autocast_enabled("cpu"), out.dtype)))
    found = sec.recover(model, teacher, images(), minutes=5, steps=100, dtype=torch.bfloat16)
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}  # what is judged is as wide as ever
    assert found.after < 0.7 * found.before
    assert found.after == pytest.approx(apart(model, teacher, held_back(images())), rel=1e-4)
    assert all(tensor.dtype != torch.bfloat16 for tensor in model.state_dict().values())


def test_other_types_are_refused():
    model, teacher = cut_pair()
    before = state(model)
    with pytest.raises(sec.SecateurError, match=r"recover: dtype is torch\.bfloat16"):
        sec.recover(model, teacher, images(), dtype=torch.float16)
    assert same(before, state(model))


def test_layers_that_lost_channels_are_compared_by_the_plan():
    model, teacher = cut_pair()
    found = sec.recover(model, teacher, images(), minutes=5, steps=10)
    assert "1" in found.layers or "0" in found.layers  # 4 of 8 channels are left in both
    for name in found.layers:
        assert not isinstance(model.get_submodule(name), nn.Dropout) or model.get_submodule(name).training is False


def test_modes_flags_and_hooks_are_as_before():
    model, teacher = cut_pair()
    model.train()
    model[0].eval()
    model[7].bias.requires_grad_(False)
    bias, modes = model[7].bias.clone(), [module.training for module in model.modules()]
    sec.recover(model, teacher, images(), minutes=5, steps=20)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[7].bias, bias)
    assert not model[7].bias.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for each in (model, teacher) for module in each.modules())
    assert not teacher.training


def test_never_worse_where_nothing_can_be_learnt():
    """A model that is its teacher already: whatever a step does is not kept."""
    teacher = small_net().eval()
    model = copy.deepcopy(teacher)
    before = state(model)
    found = sec.recover(model, teacher, images(), minutes=5, steps=40)
    assert found.after == found.before
    assert same(before, state(model))


def test_statistics_of_batch_norms_stay_while_the_model_learns():
    """In training mode they would become those of the last batches: noise, and not what is judged."""
    _, teacher = cut_pair()
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model[7].weight *= 1.5
    before = state(model)
    found = sec.recover(model, teacher, images(), minutes=5, steps=60)
    assert found.after < 0.5 * found.before
    assert not torch.equal(model[7].weight, before["7.weight"])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model[1], name), before[f"1.{name}"])


@pytest.mark.parametrize(("size", "steps", "moved"), [(16, 700, True), (8, 700, False), (16, 450, False)])
def test_statistics_move_in_long_rounds_of_batches_that_are_large_enough(size, steps, moved):
    """At length, learning by those of the batch at hand comes nearer."""
    _, teacher = cut_pair()
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model[7].weight *= 1.5
    modes = set()
    model[1].register_forward_pre_hook(lambda norm, _: modes.add(norm.training and torch.is_grad_enabled()))
    found = sec.recover(model, teacher, images(size=size), minutes=5, steps=steps)
    assert found.after < 0.5 * found.before
    assert (True in modes) is moved


def test_stale_statistics_are_taken_anew_at_first():
    teacher = small_net().train()
    with torch.no_grad():
        for batch in 5 * images(seed=3):
            teacher(batch)
    model = copy.deepcopy(teacher.eval())
    model[1].running_mean += 3.0
    found = sec.recover(model, teacher, images(), minutes=5, steps=10)
    first = found.rounds[0]
    assert (first.steps, first.better) == (0, True)
    assert first.after < 0.1 * found.before
    assert int(model[1].num_batches_tracked) == 11  # of 12 batches one is held back


class Remembering(nn.Linear):
    """Keeps what it computed in eval mode until it trains again, as LeViT keeps its attention biases."""

    kept = None

    def train(self, mode=True):
        self.kept = None if mode else self.kept
        return super().train(mode)

    def forward(self, x):
        if self.training:
            return F.linear(x, self.weight * 1.0, self.bias)
        if self.kept is None:
            self.kept = self.weight * 1.0
        return F.linear(x, self.kept, self.bias)


def test_what_a_model_keeps_for_eval_mode_is_made_anew():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    model = copy.deepcopy(teacher)
    batches = [torch.randn(16, 8) for _ in range(12)]
    sec.apply(model, sec.plan(sec.trace(model, batches[0]), sec.Ratio(0.5)))
    model[0].__class__ = Remembering
    with torch.no_grad():
        model(batches[0])
    found = sec.recover(model, teacher, batches, minutes=5, steps=60)
    assert found.after < 0.9 * found.before
    with torch.no_grad():
        said = model(batches[0])
        meant = F.linear(F.relu(F.linear(batches[0], model[0].weight, model[0].bias)), model[2].weight, model[2].bias)
    assert torch.allclose(said, meant, atol=1e-6)


def test_data_without_end():
    def without_end():
        chance = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(4, 1, 8, 8, generator=chance)

    assert len(TrainingData(without_end).held) == 8


def test_labels_count_as_well():
    def task(output, batch):
        return 9 * F.mse_loss(output, batch[1])

    pairs = [(x, torch.ones(16, 4)) for x in images(20)]  # not what the teacher says
    losses = {}
    for with_labels in (False, True):
        model, teacher = cut_pair()
        found = sec.recover(model, teacher, pairs, minutes=5, steps=60, task=task if with_labels else None)
        with torch.no_grad():
            losses[with_labels] = float(task(model.eval()(pairs[0][0]), pairs[0]))
    assert losses[True] < 0.95 * losses[False]
    assert found.after == pytest.approx(fmean(_task_loss(model, task, pair) for pair in held_back(pairs)), rel=1e-4)


def test_what_a_few_examples_hide_of_a_task_the_teacher_tells():
    """One batch is wrong by a thousand times as much as the others: its loss alone says little of chance."""
    model, teacher = cut_pair()
    pairs = [(x, torch.full((16, 1), 1000.0 if i == 0 else 1.0)) for i, x in enumerate(images(40))]

    def task(output, batch):
        with torch.no_grad():
            wanted = teacher(batch[0])
        return (batch[1] * (output - wanted) ** 2).mean()

    held = [pair for _, pair in TrainingData(pairs, lambda pair: pair[0], by_rows=lambda batch: True).held]
    before = apart(model, teacher, [x for x, _ in held])
    losses = [_task_loss(model.eval(), task, pair) for pair in held]
    found = sec.recover(model, teacher, pairs, minutes=5, steps=60, task=task, example=pairs[0][0])
    assert not clearly_lower([_task_loss(model, task, pair) for pair in held], losses)
    assert found.kept
    assert apart(model, teacher, [x for x, _ in held]) < before


@torch.no_grad()
def _task_loss(model, task, pair):
    return float(task(model(pair[0]), pair))


def test_a_loader_is_split_by_examples():
    numbers = torch.arange(100.0).unsqueeze(1)
    loader = DataLoader(TensorDataset(numbers), batch_size=5, shuffle=True)
    data = TrainingData(loader)
    held = {float(x) for _, (batch,) in data.held for x in batch}
    seen = {float(x) for _ in range(3) for _, (batch,) in data.once(0) for x in batch}
    assert len(held) == 10
    assert held | seen == set(range(100))
    assert not held & seen


@pytest.mark.parametrize("make", [lambda: images(20), lambda: lambda: iter(images(20))], ids=["list", "function"])
def test_what_is_held_back_is_never_learnt_from(make):
    data = TrainingData(make())
    held = {float(batch.sum()) for _, batch in data.held}
    seen = [float(batch.sum()) for _ in range(2) for _, batch in data.once(3)]
    assert len(held) == 2
    assert len(set(seen)) == 18
    assert not held & set(seen)


def test_examples_that_come_again_are_never_learnt_from():
    """Epochs over few examples, each in another order and other batches, with labels beside."""
    chance = torch.Generator().manual_seed(0)
    x = torch.arange(60.0).reshape(60, 1)
    orders = [part for _ in range(5) for part in torch.randperm(60, generator=chance).split(6)]
    pairs = [(x[i], 2 * x[i]) for i in orders]
    for batches in (pairs, lambda: iter(pairs)):
        data = TrainingData(batches, lambda pair: pair[0], by_rows=lambda pair: True)
        held = {float(one) for _, (rows, _) in data.held for one in rows}
        seen = [
            (float(a), float(b)) for _ in range(2) for _, batch in data.once(1) for a, b in zip(*batch, strict=True)
        ]
        assert len(held) == 6
        assert held | {a for a, _ in seen} == set(range(60))
        assert held.isdisjoint(a for a, _ in seen)
        assert all(b == 2 * a for a, b in seen)


def test_one_batch_again_and_again_leaves_nothing_to_learn_from():
    model, teacher = cut_pair()
    before, batch = state(model), images(1)[0]

    def without_end():
        while True:
            yield batch

    for batches in ([batch] * 20, without_end):
        with pytest.raises(sec.TrainingError, match="one to learn from and one to judge by, with other examples"):
            sec.recover(model, teacher, batches, steps=3)
    assert same(before, state(model))


class Mixing(nn.Module):
    """Looks at all examples of a batch at once."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x - x.mean(0))))


class TimeFirst(nn.Module):
    """Rows are moments."""

    def __init__(self):
        super().__init__()
        self.lstm, self.b = nn.LSTM(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.b(self.lstm(x)[0])


@pytest.mark.parametrize("make", [Mixing, TimeFirst])
def test_batches_stay_whole_where_rows_are_no_examples(make):
    torch.manual_seed(0)
    teacher = make().eval()
    row = torch.zeros(1, 3, 4) if make is TimeFirst else torch.zeros(1, 4)
    batches = [torch.cat([torch.randn(7, *row.shape[1:]), row]) for _ in range(20)]  # each ends with the same row
    sizes = set()
    model = copy.deepcopy(teacher)
    sec.apply(model, sec.plan(sec.trace(model, batches[0]), sec.Ratio(0.5)))
    model.register_forward_pre_hook(lambda _, args: sizes.add(len(args[0])))
    sec.recover(model, teacher, batches, steps=10)
    assert sizes == {8}


def test_what_may_be_chance_is_not_kept():
    """Labels that are noise: whatever is learnt from some is nothing for others."""
    teacher = small_net().eval()
    chance = torch.Generator().manual_seed(0)
    pairs = [(x, torch.randint(0, 4, (16,), generator=chance)) for x in images(24)]
    model = copy.deepcopy(teacher)
    before = state(model)

    def task(output, batch):  # the teacher has all of it, and the labels are a matter of chance
        return F.cross_entropy(0.01 * output, batch[1])

    found = sec.recover(model, teacher, pairs, minutes=5, steps=40, task=task, example=pairs[0][0])
    assert any(one.better for one in found.rounds)
    assert (found.kept, found.after) == (False, found.before)
    assert "as it was: nothing was clearly better" in str(found)
    assert same(before, state(model))


def test_a_run_that_was_killed_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    from secateur.training import rounds

    monkeypatch.setattr(rounds, "_ROUND", 30)
    whole, teacher = cut_pair()
    uncut = copy.deepcopy(whole)
    found = sec.recover(whole, teacher, images(), minutes=5, steps=250, checkpoint=tmp_path / "a.safetensors")
    assert sum(one.steps >= 30 for one in found.rounds) >= 2

    class Killed(BaseException): ...

    commit = rounds.RecoveryCheckpoint.commit

    def killing(self, state):
        commit(self, state)
        raise Killed

    half, before = copy.deepcopy(uncut), state(uncut)
    with monkeypatch.context() as patch:
        patch.setattr(rounds.RecoveryCheckpoint, "commit", killing)
        with pytest.raises(Killed):
            sec.recover(half, teacher, images(), minutes=5, steps=250, checkpoint=tmp_path / "b.safetensors")
    assert same(before, state(half))  # the interrupt left it as it was
    again = sec.recover(half, teacher, images(), minutes=5, steps=250, checkpoint=tmp_path / "b.safetensors")
    assert again == found
    assert same(state(half), state(whole))


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    model, teacher = cut_pair()
    path = tmp_path / "a.safetensors"
    sec.recover(copy.deepcopy(model), teacher, images(), minutes=5, steps=30, checkpoint=path)
    before = state(model)
    with pytest.raises(sec.FileError, match="not that of this model and seed"):
        sec.recover(model, teacher, images(), steps=30, checkpoint=path, seed=1)
    save_file(load_file(path), path)
    with pytest.raises(sec.FileError, match="something else; give another file"):
        sec.recover(model, teacher, images(), steps=30, checkpoint=path)
    path.write_bytes(b"nonsense")
    with pytest.raises(sec.FileError, match=r"a\.safetensors"):
        sec.recover(model, teacher, images(), steps=30, checkpoint=path)
    task = RecoveryCheckpoint.of(path, model, 0).task
    for wrong in ({}, {"rounds": 3}, {"rounds": [], "rate": "x", "length": 1, "idle": 0, "taken": 0, "values": {}}):
        keep(path, "secateur_recover", {"task": task, **wrong})
        with pytest.raises(sec.FileError, match=r"it is damaged: .*give another file"):
            sec.recover(model, teacher, images(), steps=30, checkpoint=path)
    assert same(before, state(model))


def test_the_time_is_kept():
    import time

    model, teacher = cut_pair()
    start = time.perf_counter()
    found = sec.recover(model, teacher, images(), minutes=0.03)
    assert time.perf_counter() - start < 1.8 + 3
    assert found.after < found.before


def _shared(model, teacher):
    teacher[7].weight = model[7].weight
    return model, teacher, {}


def _nan(model, teacher):
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    return model, teacher, {}


def _frozen(model, teacher):
    return model.requires_grad_(False), teacher, {}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_shared, "the model's own 7.weight"),
        (_nan, "nan; the model puts out no numbers"),
        (_frozen, "nothing to train"),
        (lambda m, t: (m, t, {"minutes": 0}), "minutes is a number above 0"),
        (lambda m, t: (m, t, {"minutes": math.nan}), "minutes is a number above 0"),
        (lambda m, t: (m, t, {"steps": 0}), "from 1 on"),
        (lambda m, t: (m, t, {"task": 3}), "task is a function"),
        (lambda m, t: (m, t, {"task": lambda output, batch: output}), "a tensor of one number"),
        (lambda m, t: (m, t, {"task": lambda output, batch: batch.labels}), "task.output, batch. failed"),
        (lambda m, t: (m, nn.Sequential(t, nn.Linear(4, 3)).eval(), {}), "have to be the same"),
    ],
)
def test_bad_input_changes_nothing(change, match):
    model, teacher, more = change(*cut_pair())
    before = state(model)
    with pytest.raises(sec.TrainingError, match=match):
        sec.recover(model, teacher, images(), **{"steps": 3, **more})
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("batches", [[], [torch.zeros(4, 1, 8, 8)], iter(images(3)), 7, torch.zeros(3, 1, 8, 8)])
def test_bad_batches(batches):
    model, teacher = cut_pair()
    with pytest.raises(sec.TrainingError, match="batches"):
        sec.recover(model, teacher, batches, steps=3)


def test_a_language_model_by_its_logits():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    teacher = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()
    model = copy.deepcopy(teacher)
    example = {"input_ids": torch.randint(0, 50, (2, 12))}
    sec.apply(model, sec.plan(sec.trace(model, example), sec.Params(0.5)))
    text = [{"input_ids": torch.randint(0, 50, (4, 12)), "labels": None} for _ in range(12)]
    found = sec.recover(model, teacher, text, minutes=5, steps=60)
    assert found.after < 0.8 * found.before
    with torch.no_grad():
        held = TrainingData(text).held[0][1]["input_ids"]
        p, q = (m(held).logits.double().softmax(-1) for m in (teacher, model))
    assert found.after == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3)


class NextWord(nn.Module):
    """A language model that puts out a tensor."""

    def __init__(self):
        super().__init__()
        self.table, self.inside, self.head = nn.Embedding(31, 16), nn.Linear(16, 64), nn.Linear(64, 31)

    def forward(self, words):
        return self.head(self.inside(self.table(words)).relu())


def test_words_are_compared_by_what_they_say():
    """Numbers that say the same, moved by a constant, are not apart."""
    torch.manual_seed(0)
    teacher = NextWord().eval()
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.head.bias += 5.0
    batches = [torch.randint(0, 31, (8, 6)) for _ in range(10)]
    found = sec.recover(model, teacher, batches, minutes=1, steps=1)
    assert found.before < 1e-6
