"""Prune many parameters as one: what goes is decided over all of them together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import prune as torch_prune

from secateur.prune.checks import (
    _validate_pruning_dim,
    _validate_structured_pruning,
    check_scores,
    count_to_prune,
    located,
    place,
)
from secateur.prune.combine import alive_channels, combine, drop_of
from secateur.prune.errors import PruneEmptyError, PruneTypeError
from secateur.prune.methods import CustomFromMask, channel_mask
from secateur.prune.selection import Segment
from secateur.prune.sites import MaskSite, install


@dataclass(frozen=True, eq=False)
class _Target:
    """One parameter to prune, with every place at which it appears; it counts once."""

    sites: tuple[MaskSite, ...]
    scores: Tensor

    @property
    def orig(self) -> Tensor:
        return self.sites[0].value

    @property
    def mask(self) -> Tensor | None:
        return self.sites[0].mask


def global_unstructured(
    parameters: Any, pruning_method: Any, importance_scores: dict[Any, Tensor] | None = None, **kwargs: Any
) -> None:
    """Prune over all of the parameters together.

    >>> from secateur.prune import L1Unstructured
    >>> net = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.Linear(4, 1))
    >>> weights = ((layer, "weight") for layer in net)
    >>> global_unstructured(weights, L1Unstructured, amount=10)
    >>> int(sum((mask == 0).sum() for mask in net.buffers()))
    10

    `parameters` is any iterable of (module, name). `pruning_method` is a class of pruning methods and
    `kwargs` its arguments; `amount` is of all entries together that are not pruned yet, and exactly that many
    go. `importance_scores` may map some of the (module, name) pairs to scores that take the place of the
    weights. A parameter that appears twice counts once and is pruned alike everywhere.

    Structured methods rank whole channels over all layers, and `amount` is of channels. Norms of channels of
    different sizes only compare if they are normalised, so this has to be asked for with `normalize=True`:
    each L_n norm is divided by the norm of a slice of ones.

    If anything is wrong, all of the modules are as they were.
    """
    normalize = kwargs.pop("normalize", False)
    targets = _targets(parameters, importance_scores)
    method = _method(pruning_method, kwargs)
    kind = getattr(method, "PRUNING_TYPE", None)
    with located("global_unstructured"), torch.no_grad():
        if kind == "unstructured":
            masks = _entries(method, targets)
        elif kind == "structured" and normalize and hasattr(method, "_rank_channels"):
            masks = _channels(method, targets)
        else:
            raise PruneTypeError(
                f"{type(method).__name__} is of type {kind!r}; pass an 'unstructured' method, "
                "or LnStructured or RandomStructured with normalize=True to rank channels across layers"
            )
    changes = []
    for target, mask in zip(targets, masks, strict=True):
        for site in target.sites:
            given = CustomFromMask(mask)
            given._tensor_name = site.name
            changes.append((site, mask, given._on_top_of(site.hook)))
    install(changes)


def _targets(parameters: Any, importance_scores: Any) -> list[_Target]:
    if not isinstance(parameters, Iterable):
        raise PruneTypeError(
            f"global_unstructured: parameters is a {type(parameters).__name__}; pass (module, name) pairs"
        )
    scores = {} if importance_scores is None else importance_scores
    if not isinstance(scores, dict):
        raise PruneTypeError(
            f"global_unstructured: importance_scores is a {type(scores).__name__}; "
            "pass a dict from (module, name) to a tensor"
        )
    targets: dict[int, list[_Target]] = {}
    for pair in parameters:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PruneTypeError(
                f"global_unstructured: parameters holds a {type(pair).__name__}; pass (module, name) pairs"
            )
        with located(place(*pair)):
            site = MaskSite.of(*pair)
            _merge(targets.setdefault(id(site.orig), []), site, scores.get(tuple(pair)))
    if not targets:
        raise PruneEmptyError("global_unstructured: parameters is empty; pass at least one (module, name)")
    return [target for same in targets.values() for target in same]


def _merge(same: list[_Target], site: MaskSite, given: Tensor | None) -> None:
    """Add a site to the target that has its parameter and its mask, or a new target for it."""
    for i, target in enumerate(same):
        if _equal(target.mask, site.mask):
            if all((site.module, site.name) != (s.module, s.name) for s in target.sites):
                same[i] = replace(target, sites=(*target.sites, site))
            return
    same.append(_Target((site,), site.scores(given)))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _method(pruning_method: Any, kwargs: dict[str, Any]) -> Any:
    try:
        method = pruning_method(**kwargs)
    except PruneTypeError:
        raise
    except TypeError as error:
        raise PruneTypeError(
            f"global_unstructured: cannot make the method: {error}; pass its class, and arguments by name"
        ) from error
    if not isinstance(method, torch_prune.BasePruningMethod):
        raise PruneTypeError(f"global_unstructured: {pruning_method!r} does not make a pruning method; pass a class")
    return method


def _entries(method: Any, targets: Sequence[_Target]) -> list[Tensor]:
    """New masks from a method that ranks single entries."""
    drop = drop_of(method)
    if drop is not None:
        segments = [
            Segment(t.scores, torch.empty_like(t.orig), fresh=True)
            if t.mask is None
            else Segment(t.scores, t.mask.to(dtype=t.orig.dtype, copy=True), fresh=False)
            for t in targets
        ]
        drop(segments)
        return [s.mask for s in segments]
    method._tensor_name = "all"
    flat = torch.cat([t.scores.reshape(-1) for t in targets])
    before = torch.cat([(torch.ones_like(t.orig) if t.mask is None else t.mask).reshape(-1) for t in targets])
    after = combine(method, flat, before).split([t.orig.numel() for t in targets])
    return [
        check_scores(m, t.orig.reshape(-1), "the computed mask").view(t.orig.shape).to(t.orig.dtype, copy=True)
        for m, t in zip(after, targets, strict=True)
    ]


def _channels(method: Any, targets: Sequence[_Target]) -> list[Tensor]:
    """New masks from a method that ranks channels, by scores that compare across layers."""
    masks = [torch.ones_like(t.orig) if t.mask is None else t.mask.to(t.orig.dtype) for t in targets]
    alive, scores = [], []
    for target, mask in zip(targets, masks, strict=True):
        site = target.sites[0]
        with located(place(site.module, site.name)):
            _validate_structured_pruning(mask)
            _validate_pruning_dim(mask, method.dim)
            alive.append(alive_channels(mask, method.dim).nonzero()[:, 0])
            ranked = method._rank_channels(target.scores, normalized=True)
            scores.append(ranked[alive[-1]].to("cpu", torch.float64))
    ranks = torch.cat(scores)
    dropped = torch.zeros(ranks.numel(), dtype=torch.bool)
    dropped[ranks.argsort(stable=True)[: count_to_prune(method.amount, ranks.numel())]] = True
    parts = dropped.split([len(a) for a in alive])
    return [
        m * channel_mask(m, method.dim, a[part.to(a.device)]) for m, a, part in zip(masks, alive, parts, strict=True)
    ]
