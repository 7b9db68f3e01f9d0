"""Taking the constants of removed channels into the biases of the layers that read them."""

import torch
from torch import Tensor, nn

from secateur.ao.opened import is_output
from secateur.ao.survey import Decision, Survey, places
from secateur.plan.plan import Plan


class Folds:
    """What each reader's bias gains, computed from the full-size model."""

    def __init__(self, survey: Survey, decision: Decision) -> None:
        self._gains: dict[str, tuple[nn.Module, Tensor]] = {}
        for name, columns in _columns(survey, decision).items():
            module = survey.modules[name.rpartition(".")[0]]
            gain = _gain(module, survey.spans[name].low, columns)
            if bool(gain.any()):
                self._gains[name] = (module, gain)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of the biases that change."""
        return {module.weight.dtype for module, _ in self._gains.values()}  # type: ignore[misc]

    def carry_out(self, plan: Plan) -> None:
        """Give every reader, cut by the plan, its new bias."""
        for name, (module, gain) in self._gains.items():
            rows = plan.kept.get(name, {}).get(0)
            gain = gain if rows is None else gain[list(rows)]
            weight, old = module._parameters["weight"], module._parameters["bias"]
            total = gain if old is None else old.detach().to(gain) + gain
            like = weight if old is None else old
            assert like is not None
            module.bias = nn.Parameter(total.to(like.dtype), requires_grad=like.requires_grad)


def _columns(survey: Survey, decision: Decision) -> dict[str, Tensor]:
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


def _gain(module: nn.Module, values: Tensor, columns: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    taps = weight.detach().to(values.dtype).flatten(2).sum(2) if weight.dim() > 2 else weight.detach().to(values.dtype)
    columns = columns.to(values.device)
    return taps[:, columns] @ values[columns]
