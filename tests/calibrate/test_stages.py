"""A run that is taken up where it was left puts out what it would have without a stop, and computes each op once."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
import timm
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from secateur.calibrate import Runs, calibrating, call
from secateur.errors import CalibrationError
from secateur.tracing.examples import handed_out, tensors_in


class UNet(nn.Module):
    """Skips over everything, pieces written into a tensor in place, sizes read out of one."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.up = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)])
        self.head = nn.Conv2d(11, 2, 1)

    def forward(self, x):
        first = self.down[0](x).relu_()
        second = self.down[1](nn.functional.max_pool2d(first, 2)).relu_()
        back = nn.functional.interpolate(self.up[0](second), scale_factor=2)
        joined = x.new_zeros(len(x), 16, *x.shape[2:])
        joined[:, :8] = first
        joined[:, 8:] = back
        joined.mul_(0.5).add_(1.0)
        x -= x.mean()  # the user's own tensor
        return {"mask": self.head(torch.cat([self.up[1](joined), x], 1)), "code": second}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class ByValue(nn.Module):
    """Goes by what is in its tensors: a branch, a number of columns, a list, a drawn number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.one(x)
        chosen = hidden[hidden.sum(1) >= hidden.sum(1).mean()]
        scale = max(hidden.abs().amax(0).tolist())
        out = self.two(chosen) if bool(x.sum() > 0) else self.other(chosen)
        return (out * scale + torch.rand(8) + torch.tensor([1.0] * 8) * hidden.std().item()).mean(0)


class Counting(nn.Module):
    """Writes into a buffer, and keeps what it made for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.cache = None

    def forward(self, x):
        self.calls += 1
        if self.cache is None:
            self.cache = torch.arange(8.0).exp()
        return self.two(self.one(x) * self.cache) * self.calls


def llama():
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=3, **small))


def mixtral():
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=99, num_hidden_layers=2, num_local_experts=4, **small))


def tokens():
    return [{"input_ids": torch.randint(0, 99, (2, n))} for n in (12, 9)]


MODELS = {
    "resnet": lambda: (timm.create_model("resnet18"), [torch.randn(2, 3, 32, 32) for _ in range(2)]),
    "unet": lambda: (UNet(), [torch.randn(2, 3, 8, 8), torch.randn(1, 3, 12, 8)]),
    "lstm": lambda: (Recurrent(), [torch.randn(3, 5, 6), torch.randn(3, 7, 6)]),
    "llama": lambda: (llama(), tokens()),
    "mixtral": lambda: (mixtral(), tokens()),
    "by-value": lambda: (ByValue(), [torch.randn(9, 4) + shift for shift in (1.0, -1.0)]),
    "counting": lambda: (Counting(), [torch.randn(3, 4) for _ in range(2)]),
}


def outputs(model, out):
    return [tensor.clone() for tensor in tensors_in(handed_out(model, out))]


def plain(model, batches):
    """What a copy puts out, batch by batch, each time with the same chances."""
    chances, results = torch.get_rng_state(), []
    for batch in batches:
        own = copy.deepcopy(model)
        with calibrating(own):
            results.append(outputs(own, call(own, copy.deepcopy(batch))))
        torch.set_rng_state(chances)
    return results


@pytest.mark.parametrize("room", [2**30, 0], ids=["in-memory", "in-files"])
@pytest.mark.parametrize("name", MODELS)
def test_stops_change_nothing_and_each_op_is_computed_once(name: str, room: int, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    model.eval()
    want, given = plain(model, batches), copy.deepcopy(batches)
    seen: list[list[int]] = [[], []]

    def see(number, every):
        def one(step):
            if step.number % every == every - 1 and step.number not in stopped[number]:
                stopped[number].add(step.number)
                step.hold()
                step.stop()
            seen[number].append(step.number)
            return step.run()

        return one

    stopped: list[set[int]] = [set(), set()]
    written = False
    with calibrating(model), Runs(model, batches, room=room) as runs:
        results: list = [None, None]
        while any(result is None for result in results):  # in turn
            for number in range(2):
                if results[number] is None:
                    results[number] = runs.run(number, see(number, 29 if name in ("mixtral", "resnet", "llama") else 7))
                    written |= bool(list(tmp_path.rglob("*.safetensors")))
        got = [outputs(model, result) for result in results]
        assert runs.restarts <= (name in ("lstm", "mixtral", "by-value"))  # where the second batch goes another way
        assert written == (room == 0 and name != "counting")
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for numbers in seen:
        assert numbers == sorted(set(numbers))
        assert len(numbers) > 7 or name == "counting"
    assert all(len(numbers) > 0 for numbers in stopped)
    assert not list(tmp_path.iterdir())
    for a, b in zip(tensors_in(batches), tensors_in(given), strict=True):
        assert torch.equal(a, b)


def test_weights_that_change_at_a_stop_are_those_that_the_run_goes_on_with() -> None:
    torch.manual_seed(0)
    model, batches = llama().eval(), tokens()
    other = copy.deepcopy(model)
    names = [name for name, weight in other.named_parameters() if "proj" in name]

    def stop_at(wanted):
        def see(step):
            if step.name == wanted:
                step.hold()
                step.stop()
            return step.run()

        return see

    with calibrating(model), Runs(model, batches) as runs:
        for name in names:
            assert [runs.run(number, stop_at(name)) for number in range(2)] == [None, None]
            model.get_parameter(name).mul_(1.5)
        got = [outputs(model, runs.run(number)) for number in range(2)]
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).mul_(1.5)
    for one, two in zip(got, plain(other, batches), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_what_is_kept_between_the_blocks_of_a_transformer_are_its_hidden_states() -> None:
    torch.manual_seed(0)
    model = llama().eval()
    batches = [{"input_ids": torch.randint(0, 99, (4, 64))}]
    name = "model.layers.2.self_attn.q_proj.weight"

    def see(step):
        if step.name == name:
            step.hold()
            step.stop()
        return step.run()

    with calibrating(model), Runs(model, batches) as runs:
        runs.run(0, see)
        hidden = 4 * 64 * 32 * 4
        assert 2 * hidden <= runs.held <= 3.5 * hidden  # the stream, the norm's output, tables; keys and values are not
        assert runs.record().stages({n for n, _ in model.named_parameters() if ".2." in n}) == [
            tuple(f"model.layers.2.self_attn.{x}_proj.weight" for x in "qkv"),
            ("model.layers.2.self_attn.o_proj.weight",),
            ("model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight"),
            ("model.layers.2.mlp.down_proj.weight",),
        ]


def test_a_model_that_changes_its_mind_is_refused() -> None:
    class Fickle(nn.Module):
        calls: ClassVar[list[int]] = []

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            Fickle.calls.append(1)
            x = self.one(x)
            return self.two(x.relu() if len(Fickle.calls) < 3 else x.tanh())

    def see(step):
        if step.name == "two.weight":
            step.hold()
            step.stop()
        return step.run()

    model = Fickle()
    with calibrating(model), Runs(model, [torch.ones(2, 4)]) as runs:
        runs.run(0, see)
        with pytest.raises(CalibrationError, match=r"not do the same.*relu.*tanh"):
            runs.run(0, see)


def test_a_full_disk_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("secateur.calibrate.spill.save_file", full)
    model = Recurrent().eval()

    def see(step):
        if step.name == "head.weight":
            step.hold()
        return step.run()

    with calibrating(model), Runs(model, [torch.randn(2, 5, 6)], room=0) as runs:
        with pytest.raises(CalibrationError, match=r"No space left.*TMPDIR"):
            runs.run(0, see)
        assert list(tmp_path.iterdir()) != []
    assert list(Path(tmp_path).iterdir()) == []
