"""Torch-Pruning 1.6.1, used as its documentation says and with every doubt decided in its favour.

It offers no search for a budget and does not recompute BatchNorm statistics; both are done here.
"""

import copy
import functools
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_pruning as tp
from benchmarks.accuracy.cutting import Method
from benchmarks.accuracy.tasks import Task, run
from torch import Tensor, nn

PATIENCE = 60
_SEARCH_STEPS = 8
_TOLERANCE = 1.01


class PeerError(RuntimeError):
    """Torch-Pruning could not do it."""


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Give up after so many seconds of the processor: on some models its search for groups does not end."""

    def give_up(*_: object) -> None:
        raise PeerError(f"no result after {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def recompute_statistics(model: nn.Module, inputs: list[Any]) -> None:
    """Set the statistics of every BatchNorm to those of the inputs."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over the batches
        norm.train()
    with torch.no_grad():
        for batch in inputs:
            run(model, batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def _gradients(task: Task, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The gradient of the loss, summed over the calibration data, by parameter name."""
    model.zero_grad()
    for batch in task.calibration(seed):
        task.loss(model, batch).backward()
    return _collected(model)


def _squared_gradients(task: Task, model: nn.Module, seed: int, n: int = 64) -> dict[str, Tensor]:
    """The mean square of the gradients of single examples.

    Its own `accumulate_grad` keeps only the last example (it looks up names in a dictionary keyed by parameters), so
    what it means to compute is computed here and put where it reads it.
    """
    squares: dict[str, Tensor] = {}
    inputs, labels = task.calibration(seed)[0]
    n = min(n, len(labels))
    for i in range(n):
        one = inputs[i : i + 1] if isinstance(inputs, Tensor) else {k: v[i : i + 1] for k, v in inputs.items()}
        model.zero_grad()
        task.loss(model, (one, labels[i : i + 1])).backward()
        for name, gradient in _collected(model).items():
            squares[name] = squares.get(name, 0) + gradient**2 / n
    return squares


def _collected(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


_IMPORTANCES: dict[str, tuple[Callable[[], Any], Callable[..., dict[str, Tensor]] | None]] = {
    "magnitude L1": (lambda: tp.importance.GroupMagnitudeImportance(p=1), None),
    "magnitude L2": (lambda: tp.importance.GroupMagnitudeImportance(p=2), None),
    "FPGM": (lambda: tp.importance.FPGMImportance(p=2), None),
    "Taylor": (lambda: tp.importance.GroupTaylorImportance(), _gradients),
    "Hessian": (lambda: tp.importance.GroupHessianImportance(), _squared_gradients),
}


@functools.lru_cache(maxsize=4)
def _prepared(task: Task, importance: str, seed: int) -> dict[str, Tensor]:
    compute = _IMPORTANCES[importance][1]
    return compute(task, task.load(), seed) if compute else {}


def _heads(model: nn.Module) -> dict[nn.Module, int]:
    """The layers whose outputs are split into heads: it has to be told."""
    found: dict[nn.Module, int] = {}
    module: Any
    for module in model.modules():
        if hasattr(module, "qkv"):
            found[module.qkv] = module.num_heads
        elif hasattr(module, "query") and hasattr(module, "num_attention_heads"):
            found |= dict.fromkeys((module.query, module.key, module.value), module.num_attention_heads)
    return found


def _set_head_sizes(model: nn.Module) -> None:
    """Attributes that attention modules read, which its users set by hand after a cut."""
    module: Any
    for module in model.modules():
        if hasattr(module, "qkv"):
            module.attn_dim = module.qkv.out_features // 3
            module.head_dim = module.attn_dim // module.num_heads
            module.scale = module.head_dim**-0.5
        elif hasattr(module, "query") and hasattr(module, "num_attention_heads"):
            module.all_head_size = module.query.out_features
            module.attention_head_size = module.all_head_size // module.num_attention_heads


def _kept_whole(task: Task, model: nn.Module) -> list[nn.Module]:
    """The layers that make the output: it has to be told."""
    if task.name == "minilm":
        writers = ("embeddings", "attention.output.dense", "output.dense", "LayerNorm")
        return [module for name, module in model.named_modules() if name.endswith(writers)]
    return [[module for module in model.modules() if isinstance(module, nn.Linear)][-1]]


def _cut_by_ratio(
    task: Task, model: nn.Module, importance: str, everywhere: bool, ratio: float, gradients: dict[str, Tensor]
) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(True)
        if name in gradients:
            parameter.grad = gradients[name].clone()
    pruner = tp.pruner.BasePruner(
        model,
        task.example(),
        importance=_IMPORTANCES[importance][0](),
        global_pruning=everywhere,
        pruning_ratio=ratio,
        max_pruning_ratio=0.95,
        ignored_layers=_kept_whole(task, model),
        num_heads=_heads(model),
        in_channel_groups={},
        out_channel_groups={},
    )
    pruner.step()
    _set_head_sizes(model)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        run(model, task.example(2))


def _search(task: Task, attempt: Callable[[float], nn.Module], factor: float) -> tuple[float, nn.Module]:
    """The smallest ratio that meets the budget, and the model that it makes.

    A ratio at which it crashes counts as too large; only what never ends is given up at once.
    """
    limit = task.cost(task.load()) / factor * _TOLERANCE
    low, high, best = 0.0, 1.0, None
    crash: Exception = PeerError(f"no ratio brings the {task.quantity} down by {factor:.2f}")
    ratio = 1 - factor**-0.5
    for _ in range(_SEARCH_STEPS):
        try:
            model = attempt(ratio)
            met = task.cost(model) <= limit
        except PeerError:
            raise
        except Exception as error:  # of any type: it checks little itself
            crash, high = error, ratio
        else:
            if met:
                high, best = ratio, (ratio, model)
            else:
                low = ratio
        ratio = (low + high) / 2 if high < 1 else min(0.98, ratio + 0.15)
    if best is None:
        raise crash
    return best


def _cut(importance: str, everywhere: bool, statistics: bool) -> Callable[..., dict[str, Any]]:
    def cut(task: Task, model: nn.Module, factor: float, seed: int, hint: dict[str, Any]) -> dict[str, Any]:
        def attempt(ratio: float) -> nn.Module:
            tried = copy.deepcopy(model)
            with patience(PATIENCE), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _cut_by_ratio(task, tried, importance, everywhere, ratio, gradients)
            return tried

        gradients = _prepared(task, importance, seed)
        if "ratio" in hint:
            ratio, smaller = hint["ratio"], attempt(hint["ratio"])
        else:
            ratio, smaller = _search(task, attempt, factor)
        model.__dict__ = smaller.__dict__
        if statistics:
            recompute_statistics(model, [inputs for inputs, _ in task.calibration(seed)])
        return {"ratio": ratio, "ranking": _ranking(importance, everywhere)}

    return cut


def _ranking(importance: str, everywhere: bool) -> str:
    return f"{importance} {'global' if everywhere else 'local'}"


def methods(importances: tuple[str, ...] = tuple(_IMPORTANCES)) -> list[Method]:
    """Each importance, ranked layer by layer and globally, with statistics as they were and recomputed."""
    return [
        Method(
            _ranking(importance, everywhere) + (" + statistics" if statistics else ""),
            "torch-pruning",
            _cut(importance, everywhere, statistics),
            ranking=_ranking(importance, everywhere),
            chance=_IMPORTANCES[importance][1] is not None,
        )
        for importance in importances
        for everywhere in (False, True)
        for statistics in (False, True)
    ]
