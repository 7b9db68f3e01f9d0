"""Take whole blocks out of the lists that they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from secateur.errors import PlanError
from secateur.planning.plans import Plan
from secateur.planning.removal import BlockRemoval
from secateur.state.held import read, write
from secateur.state.own import own_what_is_written
from secateur.surgery.places import check_numbers, reached
from secateur.surgery.split import split_layers

LISTS = (nn.ModuleList, nn.Sequential)  # what runs its entries in their order, whatever their number


def remove_blocks(model: nn.Module, removed: BlockRemoval, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take blocks out of a model, in place; what follows them moves up. Nothing changes before all of it fits.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))
    >>> remove_blocks(net, BlockRemoval(("1",)))
    >>> net
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
      (1): Linear(in_features=2, out_features=3, bias=True)
    )
    """
    check_removal(model, removed)
    own_what_is_written(model, [*(at for at, _, _ in removed.attributes), *(at for at, _ in removed.lists)])
    for place, _, value in removed.attributes:
        write(model, place, value)
    for place, kept in removed.lists:
        whole = read(model, place)
        write(model, place, type(whole)([whole[i] for i in kept]))
    before = {id(parameter) for parameter in model.parameters()}
    modules = dict(model.named_modules())  # under their names before, which the next line changes
    for name in dict.fromkeys(map(_home, removed.blocks)):
        _shorten(modules[name], {block.removeprefix(f"{name}.") for block in removed.blocks if _home(block) == name})
    if optimizer is not None:
        _let_go(optimizer, before - {id(parameter) for parameter in model.parameters()})


def shortened(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> Plan:
    """Take the blocks out of a model that a plan removes, and make two of layers that it has as two; what is left."""
    if plan.removed:
        remove_blocks(model, plan.removed, optimizer)
    for names in _in_turn(plan.factored):
        split_layers(model, names)
    return replace(plan, removed=BlockRemoval(), factored=())


def _in_turn(names: Sequence[str]) -> list[list[str]]:
    """Layers to be split, those that come from the splitting of others after these."""
    groups: list[list[str]] = []
    for name in names:
        if not groups or any(name.startswith(f"{other}.") for other in groups[-1]):
            groups.append([])
        groups[-1].append(name)
    return groups


def set_aside(model: nn.Module, removed: BlockRemoval) -> None:
    """Give what stays the names that it has without some blocks, which run on: a model to compare with, name by name.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))
    >>> set_aside(net, BlockRemoval(("1",)))
    >>> [name for name, _ in net.named_children()]
    ['0', 'without 1', '1']
    """
    modules = dict(model.named_modules())
    for name in dict.fromkeys(map(_home, removed.blocks)):
        held = modules[name]._modules
        entries = [(f"{name}.{key}".lstrip("."), key, module) for key, module in held.items()]
        held.clear()
        for full, key, module in entries:
            new = removed.after(full)
            held[f"without {key}" if new is None else new.rpartition(".")[2]] = module
        kind: Any = type(modules[name])
        if isinstance(modules[name], nn.ModuleList):  # whose entries are looked up by their names
            modules[name].__class__ = type(kind.__name__, (kind,), {"__getitem__": _in_order})


def _in_order(entries: nn.ModuleList, index: int | slice) -> Any:
    found = list(entries._modules.values())[index]
    return nn.ModuleList(found) if isinstance(found, list) else found


def _home(block: str) -> str:
    return block.rpartition(".")[0]


def _shorten(entries: nn.Module, gone: set[str]) -> None:
    held = entries._modules
    left = {key: module for key, module in held.items() if key not in gone}
    numbered = _numbered(held)
    held.clear()
    held.update({str(i): module for i, module in enumerate(left.values())} if numbered else left)


def _numbered(held: Mapping[str, object]) -> bool:
    return list(held) == [str(i) for i in range(len(held))]


def _let_go(optimizer: torch.optim.Optimizer, gone: set[int]) -> None:
    """An optimizer without the parameters that went."""
    for group in optimizer.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in gone]:
        del optimizer.state[parameter]


def check_removal(model: nn.Module, removed: BlockRemoval) -> None:
    """Refuse to remove what is not there, is no entry of a list, or is all that a list has."""
    modules = dict(model.named_modules())
    for block in removed.blocks:
        home, _, key = block.rpartition(".")
        entries = modules.get(home)
        if entries is None or key not in entries._modules:
            raise PlanError(f"the plan removes {block}, which {type(model).__name__} does not have")
        if not isinstance(entries, LISTS):
            raise PlanError(
                f"the plan removes {block}, which is no entry of an nn.ModuleList or nn.Sequential: the code of "
                f"{type(entries).__name__} calls it by its name"
            )
        if key.isdecimal() and not _numbered(entries._modules):
            raise PlanError(f"the plan removes {block}, but the entries of {home or 'the model'} are not numbered")
        if any(_inside(block, other) for other in removed.blocks):
            raise PlanError(f"the plan removes {block} and what it is part of")
        if len(entries._modules) <= sum(_home(other) == home for other in removed.blocks):
            raise PlanError(f"the plan removes all of {home or 'the model'}; one block of each list stays")
    check_numbers(modules, removed.attributes)
    for place, kept in removed.lists:
        whole = reached(modules, place)
        if type(whole) not in (list, tuple) or kept[-1] >= len(whole):
            raise PlanError(f"the plan keeps entry {kept[-1]} of {place}, which is {whole!r:.80} here")


def _inside(block: str, other: str) -> bool:
    return block.startswith(f"{other}.")


def refuse_blocks(plan: Plan, what: str) -> None:
    """Refuse a plan that removes blocks, or makes two of a layer, where that is not possible."""
    if plan.removed:
        gone = plan.removed.blocks[0]
        raise PlanError(f"{what} cuts widths only, and the plan removes {gone}; do that with apply(model, plan)")
    if plan.factored:
        raise PlanError(f"{what} cuts widths only, and the plan makes a product of two layers of {plan.factored[0]}")


__all__ = ["LISTS", "check_removal", "refuse_blocks", "set_aside", "shortened"]
