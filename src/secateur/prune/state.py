"""What pruning reads from a module and writes to it: `name_orig`, `name_mask`, `name` and one hook."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur.errors import PruneAssertionError, PruneParameterError
from secateur.prune.checks import check_module, check_parameter
from secateur.prune.masked import holds


@dataclass(frozen=True, eq=False)
class Site:
    """One parameter of one module, pruned or not."""

    module: nn.Module
    name: str
    orig: nn.Parameter
    mask: Tensor | None
    hook_id: int | None
    hook: Any

    @classmethod
    def of(cls, module: Any, name: Any) -> "Site":
        """The site `module.name`; raises if there is no parameter to prune."""
        check_module(module, name)
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

    def weight(self) -> Tensor:
        """The values that the module computes with now."""
        if self.mask is None:
            return self.orig.detach()
        if holds(self.module, self.name):
            return self.module.__dict__[self.name].detach()
        with torch.no_grad():
            return self.mask.to(dtype=self.orig.dtype) * self.orig


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


def install(changes: Sequence[tuple[Site, Tensor, Any]]) -> None:
    """Give every site its new mask and hook: all of them, or none."""
    with all_or_nothing(site.module for site, _, _ in changes):
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


@contextmanager
def all_or_nothing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back every attribute and every container of the modules if anything goes wrong inside.

    >>> layer = nn.Linear(1, 1)
    >>> with all_or_nothing([layer]):
    ...     del layer._parameters["bias"]
    ...     raise RuntimeError
    Traceback (most recent call last):
    RuntimeError
    >>> "bias" in dict(layer.named_parameters())
    True
    """
    saved = [(module, dict(module.__dict__), _contents(module)) for module in modules]
    try:
        yield
    except BaseException:
        for module, attributes, contents in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                if isinstance(container, list):
                    container[:] = content
                else:
                    container.clear()
                    container.update(content)
        raise


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in module.__dict__.values() if isinstance(value, (dict, list, set))]
