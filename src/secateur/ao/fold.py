"""Taking the constants of removed channels into the biases of the layers that read them."""

import torch
from torch import Tensor, nn

from secateur.ao.opened import is_output
from secateur.ao.survey import Decision, RemovalSurvey, places
from secateur.compat import TransposedConvolution
from secateur.planning.plans import Plan
from secateur.surgery.bias import ensure_bias


class BiasFolds:
    """What each reader's bias gains, computed from the full-size model."""

    def __init__(self, survey: RemovalSurvey, decision: Decision) -> None:
        self._opened, self._modules = survey.opened, survey.modules
        self._gains: dict[str, Tensor] = {}
        self.dtypes: set[torch.dtype] = set()  # of the biases that change
        for name, columns in _columns(survey, decision).items():
            module, weight = self._modules[name.rpartition(".")[0]], survey.tensors[name]
            gain = _gain(module, weight, survey.spans[name].low, columns)
            if bool(gain.any()):
                self._gains[name] = gain
                self.dtypes.add(weight.dtype)

    def carry_out(self, plan: Plan) -> None:
        """Give every reader, cut by the plan, its new bias."""
        for name, gain in self._gains.items():
            owner, _, key = name.rpartition(".")
            module, key = self._modules[owner], key.replace("weight", "bias", 1)
            rows = plan.kept.get(name, {}).get(1 if _transposed(module) else 0)
            gain = gain if rows is None else gain[list(rows)]
            old = ensure_bias(self._opened, owner) if key == "bias" else module._parameters[key]
            assert old is not None
            total = (old.detach().to(gain) + gain).to(old.dtype)
            setattr(module, key, nn.Parameter(total, requires_grad=old.requires_grad))


def _columns(survey: RemovalSurvey, decision: Decision) -> dict[str, Tensor]:
    """Which input columns of each reader are removed, those whose constant is dropped left out."""
    found: dict[str, Tensor] = {}
    for axis, gone in decision.removed.items():
        carried = gone & ~decision.dropped.get(axis, torch.zeros_like(gone))
        for site in axis.sites:
            if site not in survey.roles.reads or is_output(site.tensor) or survey.reader(site) is None:
                continue
            layout = survey.graph.layouts[site.tensor][site.dim]
            flags = found.setdefault(site.tensor, torch.zeros(layout.size, dtype=torch.bool))
            for index in places(layout, axis):
                flags |= (index >= 0) & carried[index]
    return found


def _gain(module: nn.Module, weight: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """What a layer makes of columns that hold constants; every tap of a kernel sees the same one."""
    taps = weight.detach().to(values.dtype)
    taps = taps.flatten(2).sum(2) if taps.dim() > 2 else taps
    groups = getattr(module, "groups", 1)
    taps = (taps.T if _transposed(module) else taps).unflatten(0, (groups, -1))
    columns = columns.to(values.device)
    return (taps[:, :, columns] @ values.view(groups, -1)[:, columns, None]).flatten()


def _transposed(module: nn.Module) -> bool:
    return isinstance(module, TransposedConvolution)
