"""What a user would notice after a cut, found without any of the library's own checks.

A `Case` is a model, an example to trace it on, and other inputs. `judge` cuts it, exactly and by default, and then runs
everything that people do with a model: other inputs, training steps, copies, pickle, save and load. An exact cut is
compared with the full-size model whose removed slices are zero, on every input, in eval and in training mode.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import secateur as sec
from oracle import each_axis
from secateur.state.held import read

# cases ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it is called with; `inputs()` gives the example first.

    `may_refuse` is what a reason must say if nothing is cut; `exact=False` where nothing can be cut exactly.
    `single` is for models that cast to float32 by themselves; `used` models have run before they are traced.
    """

    name: str
    build: Callable[[], nn.Module | World]
    inputs: Callable[[], list[Any]]
    may_refuse: str = ""
    exact: bool = True
    single: bool = False
    used: bool = False


@dataclasses.dataclass(frozen=True)
class World:
    """A model, and a function that tells what there is besides: it must say the same after the cut."""

    model: nn.Module
    outside: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Do:
    """An input that is more than a call: `Do(lambda model, x: model.encode(x), x)`."""

    run: Callable[..., Any]
    args: tuple[Any, ...]

    def __init__(self, run: Callable[..., Any], *args: Any) -> None:
        object.__setattr__(self, "run", run)
        object.__setattr__(self, "args", args)


@dataclasses.dataclass(frozen=True)
class Result:
    """`right`, `refused`, `wrong` or `crashes later`, and why."""

    verdict: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} ({self.why})" if self.why else self.verdict


class FaultError(Exception):
    """A check that did not hold."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.result = Result(verdict, why)


def floats(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same in either precision."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(torch.get_default_dtype())


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# running --------------------------------------------------------------------------------------------------------


class SameNoise(TorchDispatchMode):
    """Whatever is drawn is the same number everywhere, so that draws of two widths can be compared."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor) and out.is_floating_point():
            out.fill_(1.0 if "bernoulli" in str(func) else 0.5)
        elif func in (torch.ops.aten.randint.default, torch.ops.aten.randint.low):
            out.fill_(0 if func is torch.ops.aten.randint.default else args[0])
        return out


def call(model: nn.Module, item: Any) -> list[Tensor]:
    """Every tensor that comes out; what is drawn is the same each time."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    if isinstance(item, Do):
        return list(tensors_of(item.run(model, *item.args)))
    if isinstance(item, Mapping):
        return list(tensors_of(model(**item)))
    return list(tensors_of(model(*item) if type(item) is tuple else model(item)))


def tensors_of(item: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in anything that a model may return, in order."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from tensors_of(value, depth + 1)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from tensors_of(value, depth + 1)
    elif hasattr(item, "__dict__") and not isinstance(item, type | nn.Module) and depth < 8:
        yield from tensors_of(vars(item), depth + 1)


def run(model: nn.Module, inputs: list[Any], training: bool = False) -> list[list[Tensor]]:
    """The outputs for one input after the other, on one model: what it keeps between calls goes on."""
    model.train(training)
    with torch.no_grad():
        return [[t.clone() for t in call(model, item)] for item in inputs]


def train(model: nn.Module, inputs: list[Any]) -> None:
    """A step for each input; the gradients fit, and numbers stay finite."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    for item in inputs:
        optimizer.zero_grad()
        out = [t for t in call(model, item) if t.requires_grad]
        loss = sum(t.abs().clamp(max=9.0).mean() for t in out if t.numel())
        if not isinstance(loss, Tensor):
            continue  # a detector that finds nothing has nothing to learn from
        expect(bool(torch.isfinite(loss.detach())), "crashes later", "the loss is not finite")
        loss.backward()
        for name, p in model.named_parameters():
            expect(p.grad is None or p.grad.shape == p.shape, "crashes later", f"the gradient of {name} does not fit")
        optimizer.step()


# comparing ------------------------------------------------------------------------------------------------------


def expect(holds: bool, verdict: str, why: str) -> None:
    if not holds:
        raise FaultError(verdict, why)


def agree(got: list[list[Tensor]], want: list[list[Tensor]], what: str, tolerance: float) -> None:
    """Element by element: one that is huge lets no other be off."""
    for at, (one, other) in enumerate(zip(got, want, strict=True)):
        shapes = [[tuple(t.shape) for t in side] for side in (one, other)]
        expect(shapes[0] == shapes[1], "wrong", f"{what}: input {at} gives shapes {shapes[0]}, not {shapes[1]}")
        for a, b in zip(one, other, strict=True):
            near = torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
            if not bool(near.all()):
                off = (a - b).abs()[~near].max().item() if a.is_floating_point() or a.is_complex() else 1.0
                expect(False, "wrong", f"{what}: input {at} is off by {off:.1e}")


def same_kind(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    """Of an inexact cut: shapes are those of the full-size model, and finite is what was finite."""
    for at, (one, other) in enumerate(zip(got, want, strict=True)):
        shapes = [[tuple(t.shape) for t in side] for side in (one, other)]
        expect(shapes[0] == shapes[1], "wrong", f"input {at} gives shapes {shapes[0]}, not {shapes[1]}")
        for a, b in zip(one, other, strict=True):
            expect(bool((a.isfinite() | ~b.isfinite()).all()), "wrong", f"input {at} gives numbers that are not finite")


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}


def frozen(item: Any) -> Any:
    """Something that can be compared, of anything: tensors as lists of numbers, objects as what they hold."""
    if isinstance(item, Tensor):
        return type(item).__name__, tuple(item.shape), item.detach().double().tolist()
    if isinstance(item, Mapping):
        return {str(key): frozen(value) for key, value in item.items()}
    if isinstance(item, tuple | list):
        return [frozen(value) for value in item]
    return frozen(vars(item)) if hasattr(item, "__dict__") and not isinstance(item, type) else item


def zeroed(full: nn.Module, plan: sec.Plan, buffers: bool = True) -> nn.Module:
    """A copy of full size with zeros in every slice that the plan removes.

    A weight kept as direction and length is zero where its length is: a direction of zeros is none. That is so where
    each row has a length of its own.
    """
    big = copy.deepcopy(full)
    named = [*big.named_parameters(remove_duplicate=False)]
    named += big.named_buffers(remove_duplicate=False) if buffers else ()
    lengths = {
        n[:-1] + {"0": "1", "g": "v"}[n[-1]]: t for n, t in named if n.endswith(("weight.original0", "weight_g"))
    }
    with torch.no_grad():
        for name, tensor in named:
            for dim, index in plan.keep.get(name, {}).items():
                if dim == 0 and name in lengths and len(lengths[name]) == len(tensor):
                    continue
                gone = torch.ones(tensor.shape[dim], dtype=torch.bool)
                gone[index] = False
                tensor.index_fill_(dim, gone.nonzero().flatten(), 0)
        for place, dims in plan.kept_in_attributes:
            tensor = read(big, place)
            for dim, index in dims.items():
                tensor.index_fill_(dim, torch.tensor([at for at in range(tensor.shape[dim]) if at not in index]), 0)
    return big


# judging --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def later(what: str) -> Iterator[None]:
    """Whatever is raised here is a crash after the cut."""
    try:
        yield
    except FaultError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise FaultError("crashes later", f"{what}: {type(error).__name__}: {first:.160}") from error


def built(case: Case) -> World:
    """The model of a case, with no parameter and no statistic at a value that could hide an error."""
    torch.default_generator.manual_seed(0)
    made = case.build()
    world = made if isinstance(made, World) else World(made, lambda: None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in world.model.parameters():
            if p.is_floating_point() and not p.requires_grad:
                continue
            p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
        for name, buffer in world.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.5 * torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
    world.model.eval()
    return world


def judge(case: Case, modes: tuple[bool, ...] = (True, False)) -> Result:
    """What comes of cutting a case, exactly (True) and by default (False): the first fault, or the last result."""
    result = Result("right")
    sane(case)
    for exact in modes:
        result = judged(case, exact)
        if result.verdict != "right":
            return dataclasses.replace(result, why=f"{'exact' if exact else 'default'}: {result.why}")
    return result


def judged(case: Case, exact: bool) -> Result:
    dtype = torch.float64 if exact and not case.single else torch.float32
    with precision(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = built(case)
        if case.used:
            run(world.model, case.inputs()[:1])
        try:
            return checked(case, world, copy.deepcopy(world.model), case.inputs(), exact)
        except FaultError as failure:
            return failure.result


def sane(case: Case) -> None:
    """The case itself is in order: the full-size model does all that is asked of the cut one."""
    full, inputs = built(case).model, case.inputs()
    run(full, inputs)
    train(full, inputs)
    run(full, inputs)


def checked(case: Case, world: World, full: nn.Module, inputs: list[Any], exact: bool) -> Result:
    before = frozen(world.outside())
    cut = world.model
    try:
        graph = sec.trace(cut, inputs[0])
        plan = sec.plan(graph, each_axis(graph, 0.5), exact=exact)
        sec.apply(cut, plan)
    except sec.SecateurError as error:
        return Result("refused", f"{type(error).__name__}: {error!s:.300}")
    except Exception as error:
        return Result("crashes later", f"at once, with a raw {type(error).__name__}: {error!s:.200}")
    unchanged_outside(case, world, full, before)
    copies = {"a deep copy": copied(cut, copy.deepcopy), "an unpickled copy": pickled(cut, full)}
    copies["a loaded copy"] = loaded(cut, full, case)
    spare = copy.deepcopy(cut)
    with later("another input"):
        got = run(cut, inputs)
    for name, other in copies.items():
        if other is not None:
            with later(name):
                made = run(other, inputs)
            if not (case.used and other is copies["a loaded copy"]):  # what a model keeps is not in the file
                agree(made, got, name, 0.0)
    compare(plan, full, spare, got, inputs)
    with later("training"):
        train(cut, inputs)
    with later("after training"):
        run(cut, inputs)
    return summary(case, graph, full, cut, exact)


def unchanged_outside(case: Case, world: World, full: nn.Module, before: Any) -> None:
    with later("what is outside of the model"):
        expect(frozen(world.outside()) == before, "wrong", "something outside of the model changed")
    with later("a model built afterwards"):
        expect(shapes_of(built(case).model) == shapes_of(full), "wrong", "a model built afterwards has other sizes")


def copied(cut: nn.Module, how: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with later("a copy"):
        return how(cut)


def pickled(cut: nn.Module, full: nn.Module) -> nn.Module | None:
    """The cut model after a round trip, where the full-size one can make it."""
    try:
        pickle.dumps(full)
    except Exception:
        return None
    return copied(cut, lambda model: pickle.loads(pickle.dumps(model)))


def loaded(cut: nn.Module, full: nn.Module, case: Case) -> nn.Module | None:
    """The cut model from a file, where the full-size one can be written to one."""

    def through_a_file(model: nn.Module) -> nn.Module:
        sec.save(model, path)
        torch.default_generator.manual_seed(0)
        fresh = case.build()
        return sec.load(path, fresh.model if isinstance(fresh, World) else fresh).eval()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cut.safetensors")
        try:
            sec.save(full, path)
        except sec.FileError:
            return None
        return copied(cut, through_a_file)


def compare(plan: sec.Plan, full: nn.Module, cut: nn.Module, got: list[list[Tensor]], inputs: list[Any]) -> None:
    """Beside the full-size model: with zeros, if every axis of the plan is exact; else only in kind."""
    if not plan.axes or not all(axis.exact for axis in plan.axes):
        return same_kind(got, run(copy.deepcopy(full), inputs))
    with later("the full-size model afterwards"):
        big = zeroed(full, plan)
        if any(t.isnan().any() for out in run(copy.deepcopy(big), inputs) for t in out):
            big = zeroed(full, plan, buffers=False)  # one that something is divided by must not be zero
    near = 1e-8 if torch.get_default_dtype() == torch.float64 else 2e-3
    for training, order in ((False, 1), (False, -1), (True, 1)):
        what = "in training mode" if training else "in another order" if order < 0 else "beside zeros"
        with SameNoise():
            try:
                want = run(copy.deepcopy(big), inputs[::order], training)
            except Exception:
                continue  # the model itself does not take them in this order
            with later(what):
                agree(run(copy.deepcopy(cut), inputs[::order], training), want, what, near)
    return None


def summary(case: Case, graph: sec.Graph, full: nn.Module, cut: nn.Module, exact: bool) -> Result:
    before, after = (sum(p.numel() for p in model.parameters()) for model in (full, cut))
    if after < before or (exact and not case.exact):
        return Result("right")
    return Result("refused", f"nothing was cut: {'; '.join(dict.fromkeys(b.reason for b in graph.blocked))}")


def fine(case: Case, result: Result) -> bool:
    """Whether a result is what the case expects."""
    if result.verdict == "refused" and case.may_refuse:
        return case.may_refuse in result.why
    return result.verdict == "right"
