"""What is done on the pretend device and on the CPU alike; run as a program with the names of some jobs."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from device_models import images, pictures, texts, words
from pretend import counted, load
from torch import Tensor, nn

import secateur as sec
from secateur import ao, prune
from secateur.compensate import moments
from secateur.training import GMP, SparseTraining

DEVICE = torch.device("privateuseone", 0)  # as torch calls it before it has a name
JOBS: dict[str, Callable[[], None]] = {}


def job(function: Callable[[], None]) -> Callable[[], None]:
    JOBS[function.__name__] = function
    return function


def both(work: Callable[[torch.device], Any]) -> tuple[Any, Any]:
    """What some work makes on the CPU, and on the device."""
    found = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        found.append(work(device))
    return found[0], found[1]


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    """Two models, the first on the CPU and the second on the device, hold the same."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.device == DEVICE, name
        assert tensor.dtype == ours[name].dtype, name
        assert tensor.shape == ours[name].shape, name
        torch.testing.assert_close(tensor.cpu(), ours[name], rtol=tolerance, atol=tolerance, msg=name)
    assert all(buffer.device == DEVICE for buffer in other.buffers())


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@job
def refuses_mixed_devices() -> None:
    x, y = torch.ones(2, device=DEVICE), torch.ones(2)
    for mixed in (lambda: x + y, lambda: torch.cat([x, y]), lambda: F.linear(x, torch.ones(2, 2))):
        try:
            mixed()
        except RuntimeError:
            continue
        raise AssertionError("two devices in one op")
    with counted() as found:
        float((x + 1).sum())
        x.cpu()
        x[x > 0]
    assert found.waits == 3


@job
def every_criterion() -> None:
    def planned(device: torch.device) -> list[Any]:
        model, batches = images().to(device), [batch.to(device) for batch in pictures()]
        data = [(batch, torch.arange(8, device=device) % 5) for batch in batches]

        def error(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        graph = sec.trace(model, batches[0])
        without = [sec.Magnitude(), sec.FPGM(), sec.Random(3), sec.LAMP(), sec.BNScale()]
        inputs = [sec.Activation(batches), sec.Wanda(batches), sec.Reconstruction(batches)]
        criteria = [*without, *inputs, sec.Taylor(data, error), sec.Hessian(data, error)]
        return [sec.plan(graph, sec.Macs(0.5), importance=one).kept for one in criteria]

    one, other = both(planned)
    assert all(one)
    assert one == other


@job
def cut_and_verified() -> None:
    def cut(device: torch.device) -> tuple[nn.Module, Any]:
        model, batch = words(1).to(device), texts()[0].to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        loss(model, batch).backward()
        optimizer.step()
        sec.apply(model, sec.plan(sec.trace(model, batch), sec.Params(0.6)), optimizer=optimizer)
        loss(model, batch).backward()
        optimizer.step()
        return model, model(batch)

    (one, out), (other, there) = both(cut)
    same(one, other, 1e-4)
    torch.testing.assert_close(there.cpu(), out, rtol=1e-3, atol=1e-4)


@job
def half_precision() -> None:
    def cut(device: torch.device) -> nn.Module:
        model = words(1).to(device, torch.float16)
        return sec.apply(model, sec.plan(sec.trace(model, texts()[0].to(device)), sec.Params(0.7)))

    same(*both(cut), 0)

    def small(device: torch.device) -> nn.Module:
        model, batches = words(1).to(device, torch.bfloat16), [batch.to(device) for batch in texts()]
        sec.compress(model, batches[0], sec.Params(0.7), batches, timed=False)
        return model

    one, other = both(small)
    assert {parameter.dtype for parameter in other.parameters()} == {torch.bfloat16}
    same(one, other, 0.02)


@job
def plans_from_elsewhere() -> None:
    plan = sec.plan(sec.trace(words(), texts()[0]), sec.Ratio(0.5))
    one = sec.apply(words(), plan)
    other = sec.apply(words().to(DEVICE), sec.Plan.from_json(plan.to_json()))
    same(one, other, 0)
    back = sec.plan(sec.trace(words().to(DEVICE), texts()[0].to(DEVICE)), sec.Ratio(0.5))
    sec.apply(words(), back)  # a plan that was made on the device


@job
def without_values() -> None:
    model = words().to("meta")
    plan = sec.plan(sec.trace(model, texts()[0].to(DEVICE)), sec.Ratio(0.5), importance=sec.Random(0))
    assert plan.kept == sec.plan(sec.trace(words(), texts()[0]), sec.Ratio(0.5), importance=sec.Random(0)).kept


@job
def compressed() -> None:
    for make, data in ((images, pictures), (partial(words, 1), texts)):

        def small(device: torch.device, make: Any = make, data: Any = data) -> tuple[nn.Module, Any]:
            model, batches = make().to(device), [batch.to(device) for batch in data(3)]
            report = sec.compress(model, batches[0], sec.Macs(0.6), batches, timed=False)
            return model, (report.plan.kept, report.why)

        (one, found), (other, there) = both(small)
        assert found == there
        same(one, other, 1e-3)


@job
def host_rarely_waits() -> None:
    """How often per batch does not depend on the number of layers, nor how often per layer on its width."""
    moments._TIMES = (1,)  # how many ridges are tried depends on the data

    def chain(layers: int) -> nn.Module:
        torch.manual_seed(1)
        hidden = [part for _ in range(layers) for part in (nn.Linear(16, 16), nn.ReLU())]
        return nn.Sequential(nn.Embedding(20, 16), *hidden, nn.Linear(16, 4)).to(DEVICE)

    def waits(layers: int, batches: int) -> int:
        model = chain(layers)
        data = [batch.to(DEVICE) for batch in texts(batches)]
        graph = sec.trace(model, data[0])
        plan = sec.plan(graph, sec.Ratio(0.5))  # whatever the data say
        with counted() as found:
            sec.plan(graph, sec.Ratio(0.5), importance=sec.Reconstruction(data))
            sec.plan(graph, sec.Ratio(0.5), importance=sec.Activation(data))
            sec.plan(graph, sec.Ratio(0.5), importance=sec.Taylor(data, loss))
            sec.apply(model, plan, compensate=sec.LeastSquares(data))
        return found.waits

    per_batch = [(waits(layers, 7) - waits(layers, 4)) / 3 for layers in (2, 4)]
    # the output that is projected; whether all is finite; whether the loss is, of which a gradient is taken; its sums
    assert per_batch == [4, 4], per_batch

    def sparse(layers: int, batches: int) -> int:
        model, data = chain(layers), [batch.to(DEVICE) for batch in texts(batches)]
        with counted() as found:
            sec.sparsify(model, data, sec.NM(2, 4))
        return found.waits

    per_batch = [sparse(layers, 7) - sparse(layers, 4) for layers in (2, 4)]
    assert per_batch == [0, 0], per_batch

    def refitted(width: int) -> int:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)).to(DEVICE)
        data = [torch.randn(64, 8, device=DEVICE) for _ in range(4)]
        plan = sec.plan(sec.trace(model, data[0]), sec.Ratio(0.5))
        with counted() as found:
            sec.apply(model, plan, verify=False, compensate=sec.LeastSquares(data))
        return found.waits

    assert refitted(16) == refitted(64)


@job
def solved_on_the_device() -> None:
    """Second moments are summed, solved and eliminated where they are; only what is decided by comes to the host."""
    where: dict[str, set[str]] = {}

    def watched(name: str) -> Any:
        real = getattr(torch.linalg, name)

        def solve(matrix: Tensor, *args: Any, **more: Any) -> Any:
            where.setdefault(name, set()).add(matrix.device.type)
            return real(matrix, *args, **more)

        return real, solve

    solvers = {name: watched(name) for name in ("cholesky_ex", "solve_triangular")}
    try:
        for name, (_, solve) in solvers.items():
            setattr(torch.linalg, name, solve)
        model, batches = words(1).to(DEVICE), [batch.to(DEVICE) for batch in texts(3)]
        sec.compress(model, batches[0], sec.Macs(0.6), batches, timed=False)
    finally:
        for name, (real, _) in solvers.items():
            setattr(torch.linalg, name, real)
    assert where == {"cholesky_ex": {"pretend"}, "solve_triangular": {"pretend"}}, where


@job
def few_kernels() -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 8))
    plan = sec.plan(sec.trace(model, torch.zeros(1, 1024)), sec.Ratio(0.5))
    model.to(DEVICE)
    with counted() as found:
        sec.apply(model, plan, verify=False)
    assert found.kernels < 12 * len(plan.kept), found.kernels
    assert found.waits == 0


@job
def saved_and_loaded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for device in (torch.device("cpu"), DEVICE):
            model = images().to(device)
            sec.apply(model, sec.plan(sec.trace(model, pictures()[0].to(device)), sec.Ratio(0.5)))
            sec.save(model, Path(folder, f"{device.type}.safetensors"))
        one = sec.load(Path(folder, "pretend.safetensors"), images())
        same(one, sec.load(Path(folder, "cpu.safetensors"), images().to(DEVICE)), 0)


@job
def masks() -> None:
    def masked(device: torch.device) -> nn.Module:
        model = words().to(device)
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        torch.manual_seed(0)
        prune.global_unstructured([(layer, "weight") for layer in layers[:4]], prune.L1Unstructured, amount=0.4)
        prune.l1_unstructured(layers[4], "weight", 0.3)
        prune.random_unstructured(layers[5], "weight", 0.3)
        prune.ln_structured(layers[6], "weight", 0.5, 2, 0)
        torch.manual_seed(0)  # channels are drawn on the CPU
        prune.random_structured(layers[7], "weight", 0.5, 1)
        prune.l1_unstructured(layers[0], "weight", 0.2)
        loss(model, texts()[0].to(device)).backward()
        prune.remove(layers[0], "weight")
        return model

    same(*both(masked))


@job
def sparsifiers() -> None:
    def stepped(device: torch.device) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        sparsifier = ao.WeightNormSparsifier(0.5, (1, 4), 2)
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
        sparsifier.step()
        sparsifier.squash_mask()
        pruner = ao.FPGMPruner(0.5)
        pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
        pruner.enable_mask_update = True
        pruner.step()
        return pruner.prune()

    same(*both(stepped))


@job
def zeros_in_one_shot() -> None:
    some, two = sec.Unstructured(0.5), sec.NM(2, 4)
    methods = (sec.Magnitude(), some), (sec.Wanda(), two), (sec.RIA(), some), (sec.SparseGPT(), two), (sec.ADMM(), some)
    for method, pattern in methods:

        def sparse(device: torch.device, method: Any = method, pattern: Any = pattern) -> nn.Module:
            model, batches = words(1).to(device), [batch.to(device) for batch in texts()]
            sec.sparsify(model, batches, pattern, method=method)
            return model

        same(*both(sparse), 1e-3)


def _fit(model: nn.Module, batch: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.dropout(model(batch), 0.5).square().mean().backward()
    optimizer.step()


@job
def rounds_that_are_taken_up() -> None:
    def rounds(device: torch.device, folder: Path, stop: int | None = None, seed: int = 0) -> nn.Module:
        model, batch = images().to(device), pictures()[0].to(device)
        torch.manual_seed(seed)

        def fit(model: nn.Module, step: int) -> None:
            if step == stop:
                raise KeyboardInterrupt
            _fit(model, batch)

        options = {"fit": fit, "evaluate": lambda _: 1.0, "schedule": sec.schedule.linear(3), "checkpoint": folder}
        sec.iterate(model, batch, sec.Macs(0.5), **options)
        return model

    with tempfile.TemporaryDirectory() as folder:
        one = rounds(torch.device("cpu"), Path(folder, "cpu"))
        other = rounds(DEVICE, Path(folder, "device"))
        same(one, other)
        try:
            rounds(DEVICE, Path(folder, "killed"), stop=2)
        except KeyboardInterrupt:
            resumed = rounds(DEVICE, Path(folder, "killed"), seed=7)
        same(copy.deepcopy(other).cpu(), resumed, 0)


@job
def random_numbers_stay() -> None:
    model, batch = images().to(DEVICE), pictures()[0].to(DEVICE)
    model.norm.register_forward_hook(lambda _m, _i, out: F.dropout(out, 0.1))  # draws in eval mode, too
    before = torch.ops.pretend.random_state(), torch.get_rng_state()
    graph = sec.trace(model, batch)
    plan = sec.plan(graph, sec.Ratio(0.5), importance=sec.Activation([batch]))
    sec.apply(model, plan, verify=False)
    assert torch.equal(before[0], torch.ops.pretend.random_state())
    assert torch.equal(before[1], torch.get_rng_state())


@job
def training() -> None:
    def trained(device: torch.device) -> nn.Module:
        model, batches = images().to(device), [batch.to(device) for batch in pictures(8)]
        teacher = copy.deepcopy(model)
        graph = sec.trace(model, batches[0])
        penalty = sec.Penalty(graph)
        (loss(model, batches[0]) + penalty(model)).backward()
        sec.apply(model, sec.plan(graph, sec.Ratio(0.25)))
        sec.recover(model, teacher, batches, steps=4)
        return model

    one, other = both(trained)
    assert {name: t.shape for name, t in one.state_dict().items()} == {
        n: t.shape for n, t in other.state_dict().items()
    }

    def sparse(device: torch.device) -> nn.Module:
        model, batches = images().to(device), [batch.to(device) for batch in pictures(8)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        SparseTraining(model, optimizer, GMP(0.5, end=6, every=2))
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    same(*both(sparse))


@job
def others() -> None:
    model, batches = words(1).to(DEVICE), [batch.to(DEVICE) for batch in texts()]
    graph = sec.trace(model, batches[0])
    assert graph.macs() == sec.trace(words(1), texts()[0]).macs()
    free = [rotation.axis for rotation in sec.rotations(graph) if rotation.free]
    assert len(free) == len([rotation for rotation in sec.rotations(sec.trace(words(1), texts()[0])) if rotation.free])
    for axis in free:
        sec.rotate(model, graph, axis, torch.linalg.qr(torch.randn(axis.size, axis.size))[0])
    found = sec.sweep(model, batches[0], targets=[sec.Macs(0.8)], batches=batches)
    assert found.curve[0].macs <= 0.8
    narrow = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(DEVICE)
    sec.plan(sec.trace(narrow, torch.zeros(4, 64, device=DEVICE)), sec.Latency(0.99))


if __name__ == "__main__":
    load()
    torch.set_num_threads(1)
    result: dict[str, str] = {}
    for name in sys.argv[2:] or JOBS:
        try:
            JOBS[name]()
            result[name] = ""
        except Exception:
            result[name] = traceback.format_exc()
        Path(sys.argv[1]).write_text(json.dumps(result))
