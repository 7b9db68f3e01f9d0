"""What pruning reads from a module and writes to it: `name_orig`, `name_mask`, `name` and one hook."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur.compat import dtensor
from secateur.distributed import at_rest, meet, moved, whole
from secateur.prune.checks import check_module, check_no_nan, check_parameter, check_scores, located, place
from secateur.prune.errors import PruneAssertionError, PruneAttributeError, PruneParameterError, PruneValueError
from secateur.prune.masked import holds
from secateur.state.transaction import transaction


@dataclass(frozen=True, eq=False)
class MaskSite:
    """One parameter of one module, pruned or not."""

    module: nn.Module
    name: str
    orig: nn.Parameter
    mask: Tensor | None
    hook_id: int | None
    hook: Any

    @classmethod
    def of(cls, module: Any, name: Any) -> "MaskSite":
        """The site `module.name`; raises if there is no parameter to prune."""
        check_module(module, name)
        at_rest(module)
        hook_id, hook = find_hook(module, name)
        if hook is None:
            return cls(module, name, check_parameter(module, name), None, None, None)
        orig = module._parameters.get(name + "_orig")
        mask = module._buffers.get(name + "_mask")
        if orig is None or mask is None:
            raise PruneParameterError(
                f"has a pruning hook but no {name}_orig and {name}_mask, removed by hand; take the hook off"
            )
        return cls(module, name, orig, mask, hook_id, hook)

    @property
    def value(self) -> Tensor:
        """The parameter as it is; all of it, where it is spread over ranks."""
        return whole(self.orig.detach())

    def scores(self, given: Tensor | None) -> Tensor:
        """What its entries are ranked by: the values that the module computes with now, or those that are given."""
        weight = self.value
        if self.mask is not None:
            known = holds(self.module, self.name)
            weight = self.module.__dict__[self.name] if known else self.mask.to(weight.dtype) * weight
        check_no_nan(weight, "the weight")
        if given is None:
            return weight.detach()
        check_no_nan(check_scores(given, weight), "importance_scores")
        return given.detach()


def find_hook(module: nn.Module, name: str) -> tuple[int | None, Any]:
    """The pruning hook on `module.name` and its id, whichever library made it; None twice without one."""
    found = [
        (key, hook)
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, torch_prune.BasePruningMethod) and getattr(hook, "_tensor_name", None) == name
    ]
    if len(found) > 1:
        raise PruneAssertionError(
            f"{len(found)} pruning hooks act on it; remove all but one, combine them in a PruningContainer"
        )
    return found[0] if found else (None, None)


def install(changes: Sequence[tuple[MaskSite, Tensor, Any]]) -> None:
    """Give every site its new mask and hook: all of them, or none.

    A weight that is spread over ranks has a mask that is whole on every rank, the same on all.
    """
    spread = [mask for site, mask, _ in changes if isinstance(site.orig, dtensor() or ())]
    if spread:
        digests = [hashlib.sha256(mask.bool().cpu().numpy().tobytes()).hexdigest() for mask in spread]
        if len(set(meet("masks of weights that are spread over ranks", " ".join(digests)))) > 1:
            raise PruneValueError("the ranks came to different masks; seed all of them alike: torch.manual_seed(0)")
    with transaction(*(site.module for site, _, _ in changes)):
        for site, mask, hook in changes:
            module, name = site.module, site.name
            if site.mask is None:
                del module._parameters[name]
                module.register_parameter(name + "_orig", site.orig)
            module.register_buffer(name + "_mask", mask)
            hook._refresh(module)
            if site.hook_id is None:
                module.register_forward_pre_hook(hook)
            else:
                module._forward_pre_hooks[site.hook_id] = hook
        for site, _, _ in changes:
            moved((site.module, site.name), (site.module, site.name + "_orig"))


def remove(module: nn.Module, name: str) -> nn.Module:
    """Make pruning permanent: the parameter holds the masked values, and mask, hook and original are gone.

    >>> from secateur.prune import l1_unstructured
    >>> layer = l1_unstructured(nn.Linear(2, 1), "weight", amount=1)
    >>> sorted(remove(layer, "weight").state_dict())
    ['bias', 'weight']

    The parameter stays the same object, so optimisers keep working. Takes off torch's own pruning, too.
    """
    with located(place(module, name)):
        check_module(module, name)
        key, hook = find_hook(module, name)
        if key is None:
            raise PruneValueError("it is not pruned, so there is nothing to remove; see prune.is_pruned")
        hook.remove(module)
        del module._forward_pre_hooks[key]
    return module


def is_pruned(module: nn.Module) -> bool:
    """Whether any parameter in `module` or below has a pruning hook, of this library or of torch.

    >>> from secateur.prune import identity
    >>> layer = nn.Linear(2, 1)
    >>> is_pruned(layer), is_pruned(identity(layer, "weight"))
    (False, True)
    """
    if not isinstance(module, nn.Module):
        raise PruneAttributeError(f"a {type(module).__name__} is not a module; pass an nn.Module")
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return any(isinstance(hook, torch_prune.BasePruningMethod) for hook in hooks)
