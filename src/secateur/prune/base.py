"""The two classes that every pruning method builds on."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur.compat import dtensor
from secateur.distributed import at_rest, is_managed, moved, spread_like
from secateur.prune.checks import check_scores, located, place
from secateur.prune.combine import combine, drop_of
from secateur.prune.errors import PruneAttributeError, PruneTypeError, PruneValueError
from secateur.prune.masked import holds, make
from secateur.prune.selection import Segment
from secateur.prune.sites import MaskSite, install
from secateur.state.transaction import transaction


class BasePruningMethod(ABC):
    """A way to choose what to prune; the base of every pruning method.

    >>> from secateur import prune
    >>> class FirstHalf(prune.BasePruningMethod):
    ...     PRUNING_TYPE = "unstructured"
    ...     def compute_mask(self, t, default_mask):
    ...         mask = default_mask.clone()
    ...         mask.view(-1)[: mask.numel() // 2] = 0
    ...         return mask
    >>> layer = torch.nn.Linear(2, 2)
    >>> method = FirstHalf.apply(layer, "weight")
    >>> layer.weight_mask
    tensor([[0., 0.],
            [1., 1.]])

    A subclass sets `PRUNING_TYPE` to 'unstructured', 'structured' or 'global' and defines `compute_mask`. An
    instance sits on the module as a forward pre-hook and keeps the masked weight up to date.
    """

    _tensor_name: str

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Bring the masked weight up to date, if the weight or its mask were touched since it was made."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            setattr(module, self._tensor_name, self.apply_mask(module))
            return
        if not holds(module, self._tensor_name):
            self._refresh(module)

    @abstractmethod
    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The mask for the scores `t`: `default_mask`, less what this method prunes. Both have one shape."""

    def apply_mask(self, module: nn.Module) -> Tensor:
        """The masked weight of `module`, computed anew; gradients flow to the original weight.

        >>> from secateur import prune
        >>> layer = torch.nn.Linear(2, 1)
        >>> method = prune.CustomFromMask.apply(layer, "weight", torch.tensor([[0.0, 1.0]]))
        >>> bool((method.apply_mask(layer) == layer.weight).all())
        True
        """
        orig, mask = self._sources(module)
        return mask.to(dtype=orig.dtype) * orig

    @classmethod
    def apply(
        cls, module: nn.Module, name: str, *args: Any, importance_scores: Tensor | None = None, **kwargs: Any
    ) -> "BasePruningMethod":
        """Prune the parameter `name` of `module` with a method made from `args` and `kwargs`.

        >>> from secateur import prune
        >>> layer = torch.nn.Linear(3, 1)
        >>> _ = prune.L1Unstructured.apply(layer, "weight", amount=1)
        >>> sorted(layer.state_dict())
        ['bias', 'weight_mask', 'weight_orig']

        What is already pruned stays so, and the amount is of what is left. Returns the hook: the method, or a
        `PruningContainer` from the second time on. If anything is wrong, the module is as it was.
        """
        with located(place(module, name)):
            method = cls(*args, **kwargs)
            method._tensor_name = name
            site = MaskSite.of(module, name)
            scores = site.scores(importance_scores)
            with torch.no_grad():
                mask = method._new_mask(site, scores)
            hook = method._on_top_of(site.hook)
            install([(site, mask, hook)])
            return hook

    def prune(self, t: Tensor, default_mask: Tensor | None = None, importance_scores: Tensor | None = None) -> Tensor:
        """`t` with what this method prunes set to zero; no module is involved.

        >>> from secateur import prune
        >>> prune.L1Unstructured(amount=2).prune(torch.tensor([3.0, 1.0, 2.0]))
        tensor([3., 0., 0.])
        """
        scores = t if importance_scores is None else check_scores(importance_scores, t)
        mask = torch.ones_like(t) if default_mask is None else check_scores(default_mask, t, "default_mask")
        return t * self.compute_mask(scores, default_mask=mask)

    def remove(self, module: nn.Module) -> None:
        """Make the pruning of `module` permanent: the masked weight becomes the parameter again.

        >>> from secateur import prune
        >>> layer = torch.nn.Linear(2, 1)
        >>> method = prune.L1Unstructured.apply(layer, "weight", amount=1)
        >>> method.remove(layer)
        >>> sorted(layer.state_dict()), int((layer.weight == 0).sum())
        (['bias', 'weight'], 1)

        The hook itself stays; `prune.remove` takes it off as well.
        """
        at_rest(module)
        orig, _ = self._sources(module)
        name = self._tensor_name
        weight = self.apply_mask(module).detach() + 0  # a mask makes negative zeros of what is below; now they are zero
        with transaction(module):
            module.__dict__.pop(name, None)
            del module._parameters[name + "_orig"]
            del module._buffers[name + "_mask"]
            setattr(module, name, orig)
            if isinstance(orig, dtensor() or ()):  # FSDP2 holds its memory
                orig.detach().copy_(weight)
                moved((module, name + "_orig"), (module, name))
            else:
                orig.data = weight

    def _on_top_of(self, hook: Any) -> "BasePruningMethod":
        """This method if there is no `hook` yet; otherwise a container of what the hook does and this."""
        if hook is None:
            return self
        earlier = tuple(hook) if isinstance(hook, torch_prune.PruningContainer) else (hook,)
        return PruningContainer(*earlier, self)

    def _new_mask(self, site: MaskSite, scores: Tensor) -> Tensor:
        orig = site.value
        drop = drop_of(self)
        if site.mask is not None:
            mask = combine(self, scores, site.mask)
        elif drop is not None:
            mask = torch.empty_like(orig)
            drop([Segment(scores, mask, fresh=True)])
        else:
            mask = self.compute_mask(scores, default_mask=torch.ones_like(orig))
        return check_scores(mask, orig, "the computed mask").detach().to(dtype=orig.dtype)

    def _refresh(self, module: nn.Module) -> None:
        standard = type(self).apply_mask is BasePruningMethod.apply_mask
        kept = standard and not is_managed(module)  # what it is made of is not there between runs
        weight = make(*self._sources(module)) if kept else self.apply_mask(module)
        setattr(module, self._tensor_name, weight)

    def _sources(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        name = getattr(self, "_tensor_name", None)
        orig, mask = (getattr(module, f"{name}{end}", None) for end in ("_orig", "_mask"))
        if name is None or orig is None or mask is None:
            raise PruneAttributeError(
                f"{type(self).__name__} is not applied to this {type(module).__name__}; call apply() first"
            )
        return orig, spread_like(mask, orig)


class PruningContainer(BasePruningMethod):
    """The methods that were applied to one parameter, one after the other.

    >>> from secateur import prune
    >>> layer = torch.nn.Linear(4, 4)
    >>> _ = prune.l1_unstructured(layer, "weight", amount=4)
    >>> container = prune.L1Unstructured.apply(layer, "weight", amount=4)
    >>> len(container), type(container[0]).__name__, int(layer.weight_mask.sum())
    (2, 'L1Unstructured', 8)

    Takes methods, or one iterable of them, that act on parameters of one name.
    """

    def __init__(self, *args: Any) -> None:
        self._pruning_methods: tuple[Any, ...] = ()
        methods = args
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], torch_prune.BasePruningMethod):
            methods = tuple(args[0])
        if methods:
            if not hasattr(methods[0], "_tensor_name"):
                raise PruneAttributeError(
                    f"{methods[0]!r} does not act on a parameter yet; pass methods that have been applied"
                )
            self._tensor_name = methods[0]._tensor_name
        for method in methods:
            self.add_pruning_method(method)

    def add_pruning_method(self, method: Any) -> None:
        """Add a pruning method that acts on a parameter of the same name."""
        if not isinstance(method, torch_prune.BasePruningMethod):
            raise PruneTypeError(f"{method!r} is a {type(method).__name__}; pass a pruning method")
        own, other = getattr(self, "_tensor_name", None), getattr(method, "_tensor_name", None)
        if own is None:
            raise PruneAttributeError("this container has no parameter name; set _tensor_name first")
        if own != other:
            raise PruneValueError(
                f"this container acts on {own!r}, the method on {other!r}; add it to one for {other!r}"
            )
        self._pruning_methods = (*self._pruning_methods, method)

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, idx: Any) -> Any:
        return self._pruning_methods[idx]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less what the latest method prunes of what it leaves."""
        if not self._pruning_methods:
            raise PruneValueError("this container is empty; add a pruning method first")
        return combine(self._pruning_methods[-1], t, default_mask)


# Accepted wherever torch's own are checked for, its `is_pruned` and `remove` included.
torch_prune.BasePruningMethod.register(BasePruningMethod)  # type: ignore[type-abstract]
torch_prune.PruningContainer.register(PruningContainer)
