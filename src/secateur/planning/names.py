"""What users call parts of a model by: globs over names, modules, tensors. And which axes they mean by it."""

import glob as globs
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor, nn

from secateur.arguments import listed
from secateur.errors import PlanError
from secateur.state.held import named_tensors
from secateur.tracing import unwrap
from secateur.tracing.graph import Axis, Graph
from secateur.tracing.roles import Roles, roles

Named = str | nn.Module | Tensor  # how users call a part of a model
_WILD = frozenset("*?[")


def named(name: str, glob: str) -> bool:
    """Whether a glob names something, or what it is part of.

    >>> named("blocks.0.fc1.weight", "blocks.*"), named("blocks.0.fc1.weight", "blocks.0"), named("fc10", "fc1")
    (True, True, False)
    """
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")


def glob_of(part: object, graph: Graph, where: str) -> str:
    """What a user gave to name a part of the model, as a glob."""
    if isinstance(part, str):
        return part
    if isinstance(part, nn.Module):
        inner = unwrap(part, sharded=True)
        found = next((name for name, module in graph.model.named_modules() if module is inner), None)
    elif isinstance(part, Tensor):
        found = next((name for name, tensor in named_tensors(graph.model) if tensor is part), None)
    else:
        raise PlanError(f"{where} takes names, globs or modules of the model, not {part!r:.80}")
    if found is None:
        raise PlanError(f"{where}: this {type(part).__name__} is no part of the model that was traced")
    return globs.escape(found) or "*"


def parts_of(given: object, graph: Graph, where: str) -> tuple[str, ...]:
    """One or several parts of the model, as globs."""
    if isinstance(given, Iterator):  # it may be gone through more than once
        raise PlanError(f"{where} is names, globs or modules of the model; give a list, not a {type(given).__name__}")
    several = (given,) if isinstance(given, Named) else listed(given)
    return tuple(glob_of(part, graph, where) for part in several)


def runs_through(glob: str, axis: Axis) -> bool:
    """Whether a glob names an axis, or a tensor or module that the axis is part of, in whatever way."""
    return any(named(name, glob) for name in (axis.name, *(site.tensor for site in axis.sites)))


class Makers:
    """The layers that make the positions of each axis: whose outputs they are."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def _roles(self) -> Roles:
        return roles(self._graph)

    def of(self, axis: Axis) -> Sequence[str]:
        """The tensors that make an axis, in the order of the model; all that have it where none does so by itself."""
        made = [site.tensor for site in axis.sites if site in self._roles.makes and site not in self._roles.reads]
        return made or [site.tensor for site in axis.sites if site not in self._roles.reads] or [axis.sites[0].tensor]

    def means(self, glob: str, axis: Axis) -> bool:
        """Whether a glob means an axis: names it, or the layer whose outputs its positions are.

        Where several layers put out the same axis (all that add to a residual stream), it is the first one's; the
        others mean it only when they are named in full.
        """
        if fnmatchcase(axis.name, glob):
            return True
        first, *others = self.of(axis)
        if named(first, glob):
            return True
        return not _WILD & set(glob) and any(glob in (tensor, tensor.rpartition(".")[0]) for tensor in others)

    def by_name(self, glob: str, axis: Axis) -> bool:
        """Whether a glob means an axis by its own name: it does not name the layer, too."""
        return fnmatchcase(axis.name, glob) and not any(named(tensor, glob) for tensor in self.of(axis))

    def instead(self, glob: str, axes: Sequence[Axis]) -> Iterator[str]:
        """For a glob that means no axis, what the layers that it names have to do with which."""
        for axis in axes:
            makers = self.of(axis)
            if any(named(tensor, glob) for tensor in makers):
                yield f"{axis.name!r} is put out by {makers[0].rpartition('.')[0] or makers[0]} first"
            elif runs_through(glob, axis):
                yield f"{axis.name!r} is only read there"


__all__ = ["Makers", "Named", "glob_of", "named", "parts_of", "runs_through"]
