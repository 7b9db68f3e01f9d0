"""Distillation against the formula, written out one example at a time."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sec
from secateur.schedule import Distill


def softmax(row, temperature):
    parts = [math.exp(value / temperature) for value in row]
    return [part / sum(parts) for part in parts]


def naive(student, teacher, labels, temperature, alpha):
    """Per example: alpha T² sum p log(p / q) - (1 - alpha) log q_label, then the mean."""
    total = 0.0
    for row, taught, label in zip(student, teacher, labels, strict=True):
        p, q = softmax(taught, temperature), softmax(row, temperature)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        total += alpha * temperature**2 * kl - (1 - alpha) * math.log(softmax(row, 1)[label])
    return total / len(labels)


logits = st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=2, max_size=2)


@settings(deadline=None, max_examples=50)
@given(logits, logits, st.floats(0.5, 10), st.floats(0, 1), st.lists(st.integers(0, 2), min_size=2, max_size=2))
def test_the_formula(student, teacher, temperature, alpha, labels):
    identity = nn.Identity()  # the teacher's logits are its inputs
    loss = Distill(identity, temperature=temperature, alpha=alpha)
    found = loss(
        torch.tensor(teacher, dtype=torch.double), torch.tensor(student, dtype=torch.double), torch.tensor(labels)
    )
    assert found.item() == pytest.approx(naive(student, teacher, labels, temperature, alpha), rel=1e-6, abs=1e-8)


def test_by_hand():
    """Teacher (ln 3, 0): 3/4 and 1/4; student (0, 0): 1/2 and 1/2; label 0."""
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    loss = Distill(nn.Identity(), temperature=1.0, alpha=0.5)
    found = loss(torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2), torch.tensor([0]))
    assert found.item() == pytest.approx(0.5 * kl + 0.5 * math.log(2))


def test_the_gradient_at_a_high_temperature_is_that_of_matching_logits():
    """Hinton et al., section 2.1: with T² it tends to (z - v) / N for centred logits, times alpha."""
    torch.manual_seed(0)
    teacher, student = (torch.randn(1, 5, dtype=torch.double) for _ in range(2))
    teacher, student = teacher - teacher.mean(), (student - student.mean()).requires_grad_()
    Distill(nn.Identity(), temperature=1e4, alpha=1.0)(teacher, student).backward()
    assert torch.allclose(student.grad, (student.detach() - teacher) / 5, rtol=1e-3)


def test_the_teacher_is_a_frozen_copy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    x = torch.randn(16, 4)
    loss = Distill(model, alpha=1.0).train()
    before = {name: tensor.clone() for name, tensor in loss.teacher.state_dict().items()}
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    sec.apply(model, sec.plan(sec.trace(model, x[:1]), sec.Ratio(0.5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = loss(x, model(x))
    first.backward()
    optimizer.step()
    assert not loss.teacher.training
    assert all(not p.requires_grad and p.grad is None for p in loss.teacher.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in loss.teacher.state_dict().items())
    assert loss.teacher[0].out_features == 8
    assert all(p.grad is not None for p in model.parameters())


def test_learning_from_it_brings_the_answers_closer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    x = torch.randn(64, 4)
    loss = Distill(model, temperature=2.0, alpha=1.0)
    assert loss(x, model(x)).item() == pytest.approx(0, abs=1e-6)
    sec.apply(model, sec.plan(sec.trace(model, x[:1]), sec.Ratio(0.5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = loss(x, model(x)).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss(x, model(x)).backward()
        optimizer.step()
    assert loss(x, model(x)).item() < 0.1 * start


class Wrapped(nn.Module):
    def forward(self, ids, *, scale=1.0):
        return SimpleNamespace(logits=ids * scale, cache=None)


@pytest.mark.parametrize(
    "inputs", [(torch.ones(2, 3),), {"ids": torch.ones(2, 3), "scale": 1.0}], ids=["args", "kwargs"]
)
def test_outputs_with_logits_and_inputs_of_every_form(inputs):
    student, labels = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]), torch.tensor([0, 1])
    found = Distill(Wrapped(), temperature=2.0)(inputs, SimpleNamespace(logits=student), labels)
    assert found.item() == pytest.approx(naive(student.tolist(), [[1.0] * 3] * 2, labels.tolist(), 2.0, 0.5))


def test_a_language_model_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    labels = torch.tensor([[2, 3, -100], [5, 6, 7]])
    outputs = model(**batch)
    found = Distill(model, temperature=3.0, alpha=0.25)(batch, outputs, labels)
    wanted = 0.75 * nn.functional.cross_entropy(outputs.logits.reshape(-1, 11), labels.reshape(-1))
    assert torch.allclose(found, wanted, atol=1e-6)  # model and teacher agree, so only the task is left
    assert found.requires_grad


def test_classes_along_another_dimension():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    labels = torch.randint(0, 3, (2, 4, 5))
    rows = [t.movedim(1, -1).reshape(-1, 3) for t in (teacher, student)]
    found = Distill(nn.Identity(), dim=1)(teacher, student, labels)
    assert torch.allclose(found, Distill(nn.Identity())(*rows, labels.flatten()))
    soft = labels.unsqueeze(1).eq(torch.arange(3).view(1, 3, 1, 1)).float()
    assert torch.allclose(found, Distill(nn.Identity(), dim=1)(teacher, student, soft))


def test_a_task_of_ones_own():
    loss = Distill(nn.Identity(), alpha=0.0, task=lambda out, labels: (out - labels).abs().sum())
    assert loss(None, torch.ones(2, 2), torch.zeros(2, 2)).item() == 4.0


def test_half_precision_does_not_overflow():
    student = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16, requires_grad=True)
    found = Distill(nn.Identity(), temperature=1.0, alpha=1.0)(-student.detach(), student)
    assert torch.isfinite(found)
    assert found.item() == pytest.approx(120000.0, rel=1e-3)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"temperature": 0}, "temperature is a number above 0"),
        ({"temperature": math.inf}, "temperature is a number above 0"),
        ({"temperature": "hot"}, "temperature is a number above 0"),
        ({"alpha": 1.1}, "alpha is the teacher's part"),
        ({"alpha": -0.1}, "alpha is the teacher's part"),
        ({"alpha": True}, "alpha is the teacher's part"),
        ({"task": 3}, "task is a function"),
    ],
    ids=str,
)
def test_bad_settings(keywords, words):
    with pytest.raises(sec.SecateurError, match=words):
        Distill(nn.Identity(), **keywords)


def test_bad_calls():
    loss = Distill(nn.Identity())
    with pytest.raises(sec.SecateurError, match="pass them, or make it with alpha=1"):
        loss(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(sec.SecateurError, match=r"the teacher puts out \(2, 4\), the model \(2, 3\)"):
        loss(torch.ones(2, 4), torch.ones(2, 3), torch.tensor([0, 1]))
    with pytest.raises(sec.SecateurError, match=r"tuple is neither logits nor an object with `.logits`"):
        loss(torch.ones(2, 3), (torch.ones(2, 3),), torch.tensor([0, 1]))
    with pytest.raises(sec.SecateurError, match=r"teacher is an nn\.Module"):
        Distill("teacher")
