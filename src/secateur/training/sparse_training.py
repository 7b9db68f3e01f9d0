"""Training with masks that change: one class for all methods, driven by the optimizer's own steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur import prune
from secateur.arguments import NAMES, SEED, an_instance, check, listed
from secateur.compat import Convolution, TransposedConvolution, is_lazy
from secateur.distributed import ranks
from secateur.errors import TrainingError
from secateur.planning.names import named
from secateur.prune.methods import CustomFromMask
from secateur.prune.sites import MaskSite, install
from secateur.tracing import unwrap
from secateur.training.dynamic import Layer, SparseMethod
from secateur.training.optimizers import check_gradients, check_knows, hooked, inner

_MASKED = (nn.Linear, Convolution)


@dataclass(eq=False)
class _Masked:
    """One weight, its mask, and what is collected about it."""

    name: str  # of the weight
    module: nn.Module
    inputs: int
    orig: nn.Parameter
    gradient: Tensor | None = None
    score: Tensor | None = None
    last: Tensor = field(default_factory=lambda: torch.empty(0))  # the mask, where the model no longer has it

    @property
    def mask(self) -> Tensor:
        """The buffer as the model has it now: `model.to(…)` and accelerate's `prepare` put others in its place."""
        found = self.module._buffers.get("weight_mask")
        return self.last if found is None else found

    def seen(self) -> Layer:
        """What a method may know."""
        mask = self.mask.bool() if self.mask.numel() else torch.ones_like(self.orig, dtype=torch.bool)
        return Layer(self.name, self.orig.detach(), mask, self.gradient, self.score, self.inputs)

    def dense_gradient(self) -> Tensor:
        """That of the masked weight, masked entries too, as the optimizer would see it; zero for a layer not in use.

        Between the backward pass and the step gradients are scaled: by a `GradScaler`, by clipping. By how much, those
        of the weights that are not masked tell.
        """
        found = torch.zeros_like(self.orig) if self.gradient is None else self.gradient.to(self.orig.dtype)
        mean = _over_processes(found)
        known = mean * self.mask
        length = known.square().sum()
        if self.orig.grad is None or not bool(length > 0):
            return mean
        return mean * ((self.orig.grad * known).sum() / length)


class _GradientHook:
    """Sees the gradient of a masked weight, where the step to come looks at it. A copy of the model has a blind one."""

    def __init__(self, sparse: SparseTraining | None = None, layer: _Masked | None = None) -> None:
        self._sparse, self._layer = sparse, layer

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._sparse is None or not self._sparse.method.wants_gradient(self._sparse.step + 1):
            return
        weight = module.weight
        if isinstance(weight, Tensor) and weight.requires_grad:
            weight.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        assert self._layer is not None
        before = self._layer.gradient
        self._layer.gradient = gradient.detach().clone() if before is None else before + gradient

    def __deepcopy__(self, memo: Any) -> _GradientHook:
        return _GradientHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _GradientHook, ()


class SparseTraining:
    """Trains a model with zeros in its weights, which move as a method says.

    >>> from secateur import training
    >>> net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    >>> sparse = training.SparseTraining(net, optimizer, training.RigL(0.9, every=5, end=50))
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     net(torch.randn(8, 16)).square().mean().backward()
    ...     optimizer.step()
    >>> round(sparse.sparsity, 2)
    0.9
    >>> int((sparse.finish()[0].weight != 0).sum()) < 100
    True

    There is nothing to call in the loop: all is done before and after each `optimizer.step()`, so it works in loops
    that are not yours. The masks are those of `secateur.prune`: `weight_orig`, `weight_mask`, the same state dict. They
    are on the weights of all linear layers and convolutions, or of those that `only` names and `protect` does not. What
    the optimizer holds for a weight that goes or comes is set to zero. `state_dict` holds all that is not in the model
    and the optimizer, so that a run that was stopped goes on bit for bit; processes that train together (DDP) have the
    same masks. `finish` makes the zeros permanent.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any | None,
        method: SparseMethod,
        *,
        only: Sequence[str] = (),
        protect: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        known = an_instance(SparseMethod, "RigL(0.9), GMP(0.9) or the like")
        check("SparseTraining", TrainingError, locals(), method=known, only=NAMES, protect=NAMES, seed=SEED)
        self.model, self.method = unwrap(model), method
        self._layers = _layers(self.model, only, protect)
        self._check()
        self._optimizer = None if optimizer is None else self._known(optimizer)
        self._chance = torch.Generator().manual_seed(seed)
        self.step = 0
        self._kept: dict[str, Tensor] = {}
        masks = method.start([layer.seen() for layer in self._layers], self._chance)
        self._install(masks)
        handles = [layer.module.register_forward_pre_hook(_GradientHook(self, layer)) for layer in self._layers]
        self._ends: dict[object, Callable[[], None]] = {handle.id: handle.remove for handle in handles}
        if self._optimizer is not None:
            self.attach(self._optimizer)
        if method.keeps_weights(0):
            self._keep()

    def attach(self, optimizer: Any) -> None:
        """Follow the steps of an optimizer, where it is made only after the masks (`optimizer=None` at first)."""
        self._optimizer = self._known(optimizer)
        self._ends.pop("steps", lambda: None)()
        self._ends["steps"] = hooked(self._optimizer, self._before_step, self._after_step)

    @property
    def sparsity(self) -> float:
        """The fraction of zeros over all weights that have a mask."""
        zeros = sum(int((layer.mask == 0).sum()) for layer in self._layers)
        return zeros / sum(layer.mask.numel() for layer in self._layers)

    @property
    def sparsities(self) -> dict[str, float]:
        """The fraction of zeros of each weight that has a mask."""
        return {layer.name: float((layer.mask == 0).float().mean()) for layer in self._layers}

    def finish(self) -> nn.Module:
        """End it: the zeros are in the weights, masks and hooks are gone. Returns the model."""
        for end in self._ends.values():
            end()
        self._ends = {}
        for layer in self._layers:
            if prune.is_pruned(layer.module):
                layer.last = layer.mask
                order = ["weight" if name == "weight_orig" else name for name in layer.module._parameters]
                prune.remove(layer.module, "weight")
                _put_in_order(layer.module, order)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """The step, the random generator, scores and weights to come back to; masks are in the model."""
        return {
            "step": self.step,
            "chance": self._chance.get_state(),
            "scores": {layer.name: layer.score.clone() for layer in self._layers if layer.score is not None},
            "kept": {name: value.clone() for name, value in self._kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; the states of model and optimizer are loaded into these."""
        if not isinstance(state, Mapping) or not {"step", "chance", "scores", "kept"} <= state.keys():
            raise TrainingError("this is no state of sparse training; give what its state_dict() returned")
        for layer in self._layers:
            score = state["scores"].get(layer.name)
            if score is not None and score.shape != layer.orig.shape:
                raise TrainingError(f"the score of {layer.name} is of shape {tuple(score.shape)}: of another model")
            layer.score = None if score is None else score.clone().to(layer.orig.device)
        self.step = int(state["step"])
        self._chance.set_state(state["chance"])
        self._kept = {name: value.clone() for name, value in state["kept"].items()}

    # setting up ------------------------------------------------------------------------------------------------

    def _known(self, optimizer: Any) -> torch.optim.Optimizer:
        found = inner(optimizer)
        check_knows(found, {layer.name: layer.orig for layer in self._layers})
        return found

    def _check(self) -> None:
        owners = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        for layer in self._layers:
            if owners[id(layer.orig)] > 1:
                raise TrainingError(
                    f"{layer.name} is shared by {owners[id(layer.orig)]} layers, and a mask is on one; protect it: "
                    f"protect=({layer.name!r},)"
                )
            if not bool(layer.orig.isfinite().all()):
                raise TrainingError(f"{layer.name} holds NaN or infinity; repair it before training")
            why = self.method.refuses(layer.seen())
            if why is not None:
                raise TrainingError(f"{layer.name}: {why}; protect it: protect=({layer.name!r},)")

    def _install(self, masks: Sequence[Tensor]) -> None:
        changes = []
        for layer, mask in zip(self._layers, masks, strict=True):
            hook = CustomFromMask(mask)
            hook._tensor_name = "weight"
            changes.append((MaskSite.of(layer.module, "weight"), mask.to(layer.orig), hook))
        orders = [tuple(layer.module._parameters) for layer in self._layers]
        install(changes)
        for layer, order in zip(self._layers, orders, strict=True):
            _put_in_order(layer.module, ["weight_orig" if name == "weight" else name for name in order])
            if self.method.scored:
                layer.score = torch.zeros_like(layer.orig)
        self._clear()

    # while training --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self) -> None:
        """Before the step that is number `self.step + 1`: scores add up, masked weights learn."""
        if not self.step and self._optimizer is not None:
            check_gradients(self._optimizer)
        decay = self.method.straight_through
        for layer in self._layers if self.method.wants_gradient(self.step + 1) else ():
            layer.gradient = gradient = layer.dense_gradient()
            if layer.score is not None:
                layer.score.sub_(gradient * layer.orig)
            if decay is not None and layer.orig.grad is not None:
                layer.orig.grad.add_((gradient + decay * layer.orig) * (1 - layer.mask))

    @torch.no_grad()
    def _after_step(self) -> None:
        self.step += 1
        if self.method.due(self.step):
            seen = [layer.seen() for layer in self._layers]
            for one in seen:
                _check_numbers(one, self.step)
            self._change(self.method.change(seen, self.step, self._chance))
        for layer in self._layers:
            layer.gradient = None
        if self.method.keeps_weights(self.step):
            self._keep()
        if self.method.comes_back(self.step):
            self._come_back()

    def _change(self, masks: Sequence[Tensor]) -> None:
        for layer, mask in zip(self._layers, masks, strict=True):
            changed = layer.mask.bool() != mask
            if not bool(changed.any()):
                continue
            layer.mask.copy_(mask)
            if self.method.straight_through is None and self._optimizer is not None:
                for value in self._optimizer.state.get(layer.orig, {}).values():
                    if isinstance(value, Tensor) and value.shape == layer.orig.shape:
                        value.masked_fill_(changed, 0)
        self._clear()

    @torch.no_grad()
    def _clear(self) -> None:
        """What is masked is zero, where a weight that comes back begins at zero."""
        if self.method.regrown_at_zero:
            for layer in self._layers:
                layer.orig.mul_(layer.mask)

    def _keep(self) -> None:
        self._kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _come_back(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._kept[name])
            state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()


def _put_in_order(module: nn.Module, names: Sequence[str]) -> None:
    """Parameters as they were listed before: the state of an optimizer goes by their order."""
    for name in names:
        module._parameters[name] = module._parameters.pop(name)


def _check_numbers(layer: Layer, step: int) -> None:
    """Refuse to rank what is no number, before any mask has changed."""
    for what, value in (("weight", layer.weight), ("gradient", layer.gradient), ("score", layer.score)):
        if value is not None and not bool(value.isfinite().all()):
            raise TrainingError(
                f"{layer.name}: the {what} holds NaN or infinity after step {step}, so that nothing can be ranked; "
                "the loss was no number: lower the learning rate, or look at the data"
            )


def _over_processes(value: Tensor) -> Tensor:
    """The mean over all processes that train together."""
    if ranks() == 1:
        return value
    mean = value.clone()
    dist.all_reduce(mean)
    return mean / ranks()


def _layers(model: nn.Module, only: Sequence[str], protect: Sequence[str]) -> list[_Masked]:
    only, protect = listed(only), listed(protect)
    found = []
    for name, module in model.named_modules():
        full = f"{name}.weight".lstrip(".")
        wanted = not only or any(named(full, glob) for glob in only)
        if not isinstance(module, _MASKED) or not wanted or any(named(full, glob) for glob in protect):
            continue
        if prune.is_pruned(module):
            raise TrainingError(f"{full} has a mask already; make it permanent first: prune.remove(module, 'weight')")
        weight = module._parameters.get("weight")
        if weight is None or is_lazy(weight):
            raise TrainingError(f"{full} is no parameter that has values; run the model once, remove parametrizations")
        found.append(_Masked(full, module, 0 if isinstance(module, TransposedConvolution) else 1, weight))
    for where, globs in (("only", only), ("protect", protect)):
        for glob in globs:
            if not any(named(name, glob) for name, _ in model.named_parameters()):
                raise TrainingError(f"{where}: no parameter goes by {glob!r}")
    if not found:
        raise TrainingError("there is no linear layer and no convolution to put a mask on")
    return found
