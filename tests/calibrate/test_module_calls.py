"""Modules whose ops are done are not called again, unless a call does more than to make its result."""

from collections import Counter

import pytest
import torch
from torch import nn

from secateur.calibrate import Runs, calibrating

CALLS: Counter[str] = Counter()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        CALLS[type(self).__name__] += 1
        return x + self.two(self.one(x).relu())


class Remembers(Block):
    """What it holds is read by the next block."""

    last = None

    def forward(self, x):
        out = super().forward(x)
        self.last = out.mean()
        return out


class Tells(Block):
    """Writes into what it is given."""

    def forward(self, x, told):
        out = super().forward(x)
        told.append(out.mean())
        return out


class Turns(Block):
    """Changes the shape of the tensor that it is given."""

    def forward(self, x):
        out = super().forward(x)
        x.unsqueeze_(0)
        return out


class Pair(Block):
    """Gives back more than one tensor."""

    def forward(self, x):
        out = super().forward(x)
        return {"out": out, "views": (out[:1], [out.mT, None, 2])}


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x, told = x.exp(), []
        for block in self.blocks:
            if isinstance(block, Tells):
                x = block(x, told) + sum(told)
            elif isinstance(block, Turns):
                given = x.clone()
                x = block(given) * given.squeeze(0) * given.ndim
            elif isinstance(block, Pair):
                made = block(x)
                x = made["out"] + made["views"][0] + made["views"][1][0][:, 0] * made["views"][1][2]
            else:
                x = block(x)
            if isinstance(block, Remembers):
                x = x * block.last
        return self.last(x)


def stops(runs: Runs, names: list[str]):
    """Each batch in its turn to each of some products, then to the end."""

    def see(wanted):
        def one(step):
            if step.name == wanted:
                step.hold()
                step.stop()
            return step.run()

        return one

    runs.record()
    CALLS.clear()
    for name in names:
        for number in range(len(runs.batches)):
            assert runs.run(number, see(name)) is None
    return [runs.run(number) for number in range(len(runs.batches))]


@pytest.mark.parametrize(
    ("kind", "again"), [(Block, False), (Pair, False), (Remembers, True), (Tells, True), (Turns, True)]
)
def test_a_module_is_called_again_only_if_it_does_more_than_make_its_result(kind, again: bool) -> None:
    torch.manual_seed(0)
    net = Net(*(kind() for _ in range(5)))
    batches = [torch.randn(4, 4) for _ in range(2)]
    with torch.no_grad():
        want = [net(batch) for batch in batches]
    with calibrating(net), Runs(net, batches) as runs:
        got = stops(runs, [f"blocks.{i}.two.weight" for i in range(5)])
        assert runs.restarts == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # each batch calls a block that it stops in twice; otherwise each of six runs calls all blocks so far
    assert CALLS[kind.__name__] == 2 * (5 + 5 + sum(range(1, 5)) if again else 10)


def test_a_module_with_a_hook_is_called_again() -> None:
    net, heard = Net(Block(), Block(), Block()), []
    net.blocks[0].two.register_forward_hook(lambda *_: heard.append(1))
    with calibrating(net), Runs(net, [torch.randn(2, 4)]) as runs:
        stops(runs, ["blocks.1.two.weight", "blocks.2.two.weight"])
    assert len(heard) == 4  # in the recorded run and in each of the three others


def test_what_an_op_in_a_module_made_can_be_asked_for() -> None:
    torch.manual_seed(0)
    net, made = Net(Block(), Block(), Block()), []
    with calibrating(net), Runs(net, [torch.randn(2, 4)]) as runs:
        sums = [n for n, done in enumerate(runs.record().log) if str(done.op).startswith("aten.add.Tensor")]
        stops_at = {"blocks.1.two.weight": sums[0], "blocks.2.two.weight": sums[1]}
        for name, asked in stops_at.items():

            def see(step, name=name, asked=asked):
                if step.name == name:
                    made.append(step.made(asked))
                    step.hold()
                    step.stop()
                return step.run()

            for _ in range(2):  # the second time, all that comes before is done
                runs.run(0, see, [asked])
    x = net.blocks[0](runs.batches[0].exp())
    for one, two in zip(made, [x, x, net.blocks[1](x), net.blocks[1](x)], strict=True):
        assert torch.equal(one, two)


def test_a_module_that_a_run_makes_and_forgets_is_called_again() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x):
            return self.two(nn.Sequential(self.one, nn.Softmax(dim=-1))(x))

    net = Makes()
    with calibrating(net), Runs(net, [torch.randn(2, 4)]) as runs:
        calls = runs.record().calls
    own = {id(module) for module in net.modules()}
    assert {module for _, module in calls} <= own
    assert {id(net.one), id(net.two)} <= {module for _, module in calls}
