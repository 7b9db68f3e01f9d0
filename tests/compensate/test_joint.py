"""The layers of a block, fitted together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.compensate import joint
from secateur.errors import CalibrationError


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.last = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.last(self.second(self.norm(self.first(x)).relu_()))).relu_()


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Residual(8) for _ in range(4)))
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    for _ in range(20):  # norms with statistics
        net(torch.randn(16, 3, 8, 8))
    return net.eval()


def images(batches: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(64, 3, 8, 8) for _ in range(batches)]


def planned(net: nn.Module, batches: list[Tensor]) -> sec.Plan:
    return sec.plan(sec.trace(net, batches[0][:2]), sec.Macs(0.3), importance=sec.Reconstruction(batches))


def cut(net: nn.Module, batches: list[Tensor], steps: int) -> sec.Outcome:
    sec.apply(net, planned(net, batches), compensate=sec.LeastSquares(batches, joint=steps))
    found = sec.outcome(net)
    assert found is not None
    return found


def test_blocks_come_nearer_than_layers_by_themselves() -> None:
    net, batches = small_resnet(), images(16)
    net[1][0].first.weight.requires_grad_(False)
    want, alone, together = copy.deepcopy(net), copy.deepcopy(net), net
    layers, blocks = cut(alone, batches, 0), cut(together, batches, 60)
    assert blocks.before == layers.before
    assert blocks.after < layers.after
    fitted = {layer.name: layer for layer in blocks.layers if layer.note == "its layers together"}
    assert "1.0" in fitted
    assert all(layer.after < 0.97 * layer.before for layer in fitted.values())
    torch.manual_seed(2)
    fresh = [torch.randn(256, 3, 8, 8)]
    stream = planned(want, batches).keep.get("0.weight", {}).get(0, slice(None))
    right = outputs(want, fresh)
    for name in fitted:  # on data that nothing was fitted to
        made = (outputs(model, fresh)[name][0] for model in (alone, together))
        off = [float((each - right[name][0][:, stream]).square().mean()) for each in made]
        assert off[1] < 0.99 * off[0]
    assert not together[1][0].first.weight.requires_grad
    assert all(parameter.grad is None for parameter in together.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in together.modules())


def outputs(net: nn.Module, batches: list[Tensor]) -> dict[str, list[Tensor]]:
    """What each block puts out, seen from outside."""
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for batch in batches:
            x = net[0](batch)
            for number, block in enumerate(net[1]):
                x = block(x)
                found.setdefault(f"1.{number}", []).append(x.clone())
    return found


def test_what_is_said_of_a_block_is_what_it_does_in_the_model() -> None:
    net, batches = small_resnet(), images(16)
    whole = copy.deepcopy(net)
    fitted = {layer.name: layer for layer in cut(net, batches, 30).layers if "together" in layer.note}
    assert len(fitted) > 1
    held = [batches[6], batches[14]]
    ours, theirs = outputs(net, held), outputs(whole, held)
    for name, layer in fitted.items():
        pairs = zip(ours[name], theirs[name], strict=True)
        off = [float((a - b).square().mean() / (b - b.mean(0)).square().mean()) for a, b in pairs]
        assert layer.after == pytest.approx(sum(off) / len(off), rel=1e-3), name


@pytest.mark.parametrize("target", [pytest.param(sec.Macs(0.6), marks=pytest.mark.slow), sec.Ratio(0.25)])  # the stream
def test_a_language_model(target: sec.Macs | sec.Ratio) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes)).eval()
    batches = [torch.randint(0, 50, (4, 12)) for _ in range(8)]
    plan = sec.plan(sec.trace(net, batches[0]), target)
    alone = copy.deepcopy(net)
    sec.apply(alone, plan, compensate=sec.LeastSquares(batches))
    sec.apply(net, plan, compensate=sec.LeastSquares(batches, joint=40))
    one, other = sec.outcome(alone), sec.outcome(net)
    assert one is not None
    assert other is not None
    assert other.after <= one.after
    assert [layer for layer in other.layers if layer.name.startswith("model.layers.") and "together" in layer.note]


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batches = small_resnet(), images()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    real, calls = joint._descended, []

    def second_raises(*args: object) -> dict[str, Tensor]:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(joint, "_descended", second_raises)
    with pytest.raises(KeyboardInterrupt):
        cut(net, batches, 5)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_block_that_remembers_is_left_alone() -> None:
    class Counting(Residual):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x) * (1 + 1e-3 * self.calls)

    net = small_resnet()
    odd = Counting(8)
    odd.load_state_dict(net[1][1].state_dict())
    assert not joint._repeats(odd.eval(), joint._Sample((torch.randn(2, 8, 4, 4),), {}, torch.zeros(2, 8, 4, 4)))


def test_too_few_batches_are_said() -> None:
    net, batches = small_resnet(), images()[:3]
    assert any("four batches" in note for note in cut(net, batches, 5).notes)


@pytest.mark.parametrize("steps", [-1, True, 1.5, "many"])
def test_bad_numbers_of_steps(steps: object) -> None:
    with pytest.raises(CalibrationError, match="joint is how many steps"):
        sec.LeastSquares([torch.zeros(1)], joint=steps)  # type: ignore[arg-type]


def test_without_a_block_there_is_nothing_to_fit_together() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    batches = [torch.randn(16, 8) for _ in range(6)]
    report = sec.compress(net, batches[0][:1], sec.Macs(0.6), batches, timed=False, joint=5)
    assert report.plan.keep
