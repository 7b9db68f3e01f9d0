"""Which masked rows can be removed, what constants they leave behind, and why others must stay."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from secateur.ao.opened import Opened, Span, flipped, inner, is_output, observe, varied
from secateur.ao.parametrization import is_called
from secateur.axes import Layout, free_atoms, keep_mask, positions, why_fixed
from secateur.compat import TransposedConvolution
from secateur.planning.counts import settle
from secateur.planning.zeros import dead_positions
from secateur.state.held import named_tensors
from secateur.tracing import Axis, Graph, Site
from secateur.tracing.examples import Inputs
from secateur.tracing.roles import Roles, roles

_ConvNd = nn.Conv1d | nn.Conv2d | nn.Conv3d


def places(layout: Layout, axis: Axis) -> Iterator[Tensor]:
    """For each place of an axis in a layout, to which of its positions each index belongs (-1: none)."""
    return (torch.from_numpy(index) for atom, index in positions(layout) if atom is axis.atom)


def all_of(layout: Layout, axis: Axis, flags: Tensor) -> Tensor:
    """Of which positions of an axis every index of a layout is flagged."""
    result = torch.ones(axis.size, dtype=torch.bool)
    for index in places(layout, axis):
        result[index[(index >= 0) & ~flags]] = False
    return result


@dataclass
class Decision:
    """What is to be removed of each axis; what of that is not exact; and why the rest stays."""

    removed: dict[Axis, Tensor] = field(default_factory=dict)
    refused: dict[Axis, str] = field(default_factory=dict)
    inexact: dict[Axis, str] = field(default_factory=dict)
    dropped: dict[Axis, Tensor] = field(default_factory=dict)  # removed without what they still carry


class RemovalSurvey:
    """A masked model, opened and traced, and everything that is found out about it by running it."""

    def __init__(self, opened: Opened, graph: Graph, call: Inputs, dtype: torch.dtype) -> None:
        self.opened, self.graph, self.call, self.dtype = opened, graph, call, dtype
        self.modules = dict(opened.named_modules())

    @cached_property
    def roles(self) -> Roles:
        return roles(self.graph)

    @cached_property
    def spans(self) -> dict[str, Span]:
        """What every layer that could take a constant into its bias reads, and what the model puts out."""
        return self._observe(flip=False)

    @cached_property
    def _constant(self) -> dict[str, Tensor]:
        """Which columns of these do not depend on the input, whatever the signs of the parameters."""
        other = self._observe(flip=True) if self.spans else {}
        both = ((name, span, other[name]) for name, span in self.spans.items() if name in other)
        return {name: (a.constant & b.constant).cpu() for name, a, b in both}

    def _observe(self, flip: bool) -> dict[str, Span]:
        sites = (site for axis in self.graph.axes for site in axis.sites if site in self.roles.reads)
        readers = {site.tensor: module for site in sites if (module := self.reader(site)) is not None}
        calls = [varied(self.call, seed) for seed in (1, 2)]
        change = flipped(self.opened) if flip else lambda _, tensor: tensor
        try:
            return observe(self.opened, calls, readers, self.dtype, change)
        except Exception:  # the user's forward, on other numbers than it was made for: nothing is known to be constant
            return {}

    def reader(self, site: Site) -> nn.Module | None:
        """The layer that contracts its input with a site and can take a constant into its bias."""
        owner, _, key = site.tensor.rpartition(".")
        module = self.modules[owner]
        if key == "weight" and _one_tap_transposed(module):
            return module if site.dim == 0 else None
        first = isinstance(module, nn.RNNBase) and module.bias and key.startswith("weight_ih_l0")
        return module if site.dim == 1 and (first or (key == "weight" and is_called(module))) else None

    # what is off -----------------------------------------------------------------------------------------------

    def off(self, masks: Mapping[str, Tensor]) -> dict[Axis, Tensor]:
        """For each axis that masked tensors make, a line for each of them: the positions all of whose rows are off."""
        found = {}
        for axis in self.graph.axes:
            tied = [site for site in axis.sites if site.dim == 0 and site.tensor in masks]
            gone = [all_of(self.graph.layouts[site.tensor][0], axis, ~masks[site.tensor]) for site in tied]
            if any(bool(line.any()) for line in gone):
                found[axis] = torch.stack(gone)
        return found

    def decide(self, masks: Mapping[str, Tensor]) -> Decision:
        """What goes, so that every size that the model's code computes still comes out right.

        A position is looked at if any masked tensor has it off: what else makes it may be multiplied by that.
        """
        decision = Decision()
        off = self.off(masks)
        dead = dead_positions(self.graph, tuple(off))
        for axis, lines in off.items():
            gone = lines.any(0)
            exact = gone & dead.get(axis, torch.zeros_like(gone))
            rest = gone & ~exact
            if bool(rest.any()):
                exact |= self._judge(axis, rest, rest & lines.all(0), masks, decision)
            if bool(exact.all()):
                exact[0] = False
                decision.refused[axis] = f"all of its {axis.size} rows are off, and one must stay"
            if bool(exact.any()):
                decision.removed[axis] = exact
        self._settle(decision)
        return decision

    def _settle(self, decision: Decision) -> None:
        """Leave out axes that cannot lose just what they should, until all others can."""
        while True:
            wanted = {axis.atom: axis.size - int(gone.sum()) for axis, gone in decision.removed.items()}
            settled = settle(self.graph.equations, wanted)
            stuck = [axis for axis in decision.removed if settled.get(axis.atom, axis.size) != wanted[axis.atom]]
            if not stuck:
                return
            for axis in stuck:
                del decision.removed[axis]
                decision.inexact.pop(axis, None)
                decision.refused[axis] = "the model's code needs it to have the size of others, which keep more rows"

    def _judge(
        self, axis: Axis, rest: Tensor, agreed: Tensor, masks: Mapping[str, Tensor], decision: Decision
    ) -> Tensor:
        """Which of the positions that are off, but not zero for all that follows, can go nevertheless.

        `agreed` are those that every masked tensor has off.
        """
        recurrent = self._recurrent(axis, masks)
        reason = axis.why if not axis.exact else self._unreadable(axis)
        if recurrent is not None and bool(agreed.any()):
            decision.inexact[axis] = recurrent if axis.exact else f"{recurrent}; {axis.why}"
            decision.dropped[axis] = agreed
        elif reason and bool(agreed.any()):
            decision.refused[axis] = reason
        if recurrent is not None or reason:
            return agreed & (recurrent is not None)
        silent = self._silent(axis)
        fits = rest.clone()
        for site in self._reads(axis):
            fits &= self._fits(axis, site, silent, decision)
        if bool((rest & ~fits).any()):
            decision.refused.setdefault(axis, "something that is not masked still feeds these channels")
        carried = fits & silent & ~self._zero(axis)
        if bool(carried.any()):
            decision.dropped[axis] = carried
            decision.inexact[axis] = (
                "the activation of zero is not zero, and is not carried on for rows that are off with their bias"
            )
        return fits

    def _reads(self, axis: Axis) -> list[Site]:
        return [site for site in axis.sites if site in self.roles.reads]

    def _unreadable(self, axis: Axis) -> str | None:
        """Why a constant could not be taken over by all that reads an axis."""
        if axis.atom in self.roles.mixed:
            return "its channels are not zero, and more than the weights of layers reads them"
        for site in self._reads(axis):
            if not is_output(site.tensor) and self.reader(site) is None:
                return f"its channels are not zero, and {inner(site.tensor)} cannot take a constant into a bias"
        return None

    def _fits(self, axis: Axis, site: Site, silent: Tensor, decision: Decision) -> Tensor:
        """Which positions leave nothing but a constant in a reader, that its bias can stand for."""
        if site.tensor not in self._constant:
            return torch.zeros(axis.size, dtype=torch.bool)
        constant = self._all_channels(axis, site, self._constant[site.tensor])
        module = None if is_output(site.tensor) else self.reader(site)
        if module is None or not _pads_with_zeros(module):
            return constant
        zero = self._all_channels(axis, site, self.spans[site.tensor].low == 0)
        unbiased = silent if not self._biased(axis) else torch.zeros_like(silent)
        if bool((constant & ~zero & ~unbiased).any()):
            decision.refused[axis] = (
                f"its channels are constant, but not zero, and {inner(site.tensor)} reads zeros beyond their border"
            )
        return constant & (zero | unbiased)

    def _all_channels(self, axis: Axis, site: Site, flags: Tensor) -> Tensor:
        """Of which positions all of a reader's channels are flagged; each column of its weight reads one per group."""
        groups = getattr(self.modules[site.tensor.rpartition(".")[0]], "groups", 1)
        return all_of(self.graph.layouts[site.tensor][site.dim], axis, flags.cpu().view(groups, -1).all(0))

    # what makes a position -------------------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return dict(named_tensors(self.opened))

    def _makes(self, axis: Axis) -> list[Site]:
        return [site for site in axis.sites if site not in self.roles.reads]

    def _silent(self, axis: Axis) -> Tensor:
        """The positions for which every tensor that makes them is zero."""
        held = (layout for name in self.graph.places for layout in self.graph.layouts[name])
        silent = torch.full((axis.size,), not any(axis.atom in free_atoms(layout) for layout in held))
        for site in self._makes(axis):
            tensor = self.tensors[site.tensor]
            zero = tensor.movedim(site.dim, 0).reshape(tensor.shape[site.dim], -1).eq(0).all(1).cpu()
            silent &= all_of(self.graph.layouts[site.tensor][site.dim], axis, zero)
        return silent

    def _zero(self, axis: Axis) -> Tensor:
        """The positions at which everything that reads them reads zero, or that end in an output."""
        zero = torch.ones(axis.size, dtype=torch.bool)
        for site in self._reads(axis):
            if not is_output(site.tensor):
                zero &= self._all_channels(axis, site, self.spans[site.tensor].low == 0)
        return zero

    def _biased(self, axis: Axis) -> bool:
        return any(site.tensor.endswith("bias") for site in self._makes(axis))

    def _recurrent(self, axis: Axis, masks: Mapping[str, Tensor]) -> str | None:
        """For the hidden units of a recurrent layer that nothing else makes: what is not exact about removing them."""
        matrices = [site.tensor for site in self._makes(axis) if self.tensors[site.tensor].dim() > 1]
        owners = {name.rpartition(".")[0] for name in matrices}
        modules = [self.modules[owner] for owner in owners]
        if len(modules) != 1 or not isinstance(modules[0], nn.RNNBase) or not all(name in masks for name in matrices):
            return None
        return "its masked hidden units still move by their biases"

    # the result ------------------------------------------------------------------------------------------------

    def leftover(self, masks: Mapping[str, Tensor], decision: Decision) -> dict[str, str]:
        """For each masked tensor with rows that are off but stay, the reason."""
        kept = {axis.atom: (~gone).numpy() for axis, gone in decision.removed.items()}
        found = {}
        for name, mask in masks.items():
            layout = self.graph.layouts[name][0]
            stays = torch.from_numpy(np.ascontiguousarray(keep_mask(layout, kept))) & ~mask
            if bool(stays.any()):
                found[name] = f"{int(stays.sum())} of {len(mask)} rows: {self._why(layout, decision)}"
        return found

    def _why(self, layout: Layout, decision: Decision) -> str:
        here = [axis for axis in self.graph.axes if any(True for _ in places(layout, axis))]
        if not here:
            return why_fixed(layout)
        reasons = [decision.refused[axis] for axis in here if axis in decision.refused]
        return reasons[0] if reasons else f"they are tied to rows that are not off, along {inner(here[0].name)}"


def _one_tap_transposed(module: nn.Module) -> bool:
    """Whether a transposed convolution makes the same of a constant everywhere: more taps overlap less at borders."""
    if not isinstance(module, TransposedConvolution) or module.groups != 1:
        return False
    return {*module.kernel_size, *module.stride} == {1}


def _pads_with_zeros(module: nn.Module) -> bool:
    if not isinstance(module, _ConvNd) or module.padding_mode != "zeros":
        return False
    if isinstance(module.padding, str):
        return module.padding == "same" and any(side > 1 for side in module.kernel_size)
    return any(module.padding)
