"""Ways to make groups of weights small, each a value: a function of what is known of the groups of one axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from secateur.arguments import a_number, check_fields
from secateur.errors import TrainingError


@dataclass(frozen=True)
class View:
    """What a penalty sees of an axis: one number per position of each."""

    squares: Tensor  # the sum of the squares of its weights
    sizes: Tensor  # how many these are
    scales: Tensor | None  # the scale of its batch norm
    doomed: Tensor  # whether the target would have it go, as things stand
    step: int


class PenaltyMethod(ABC):
    """A penalty on the groups of an axis."""

    needs_target = False  # without one, nothing is doomed
    needs_scales = False

    @property
    def half_space(self) -> float | None:
        """Where groups become zero that a step has turned; see `HalfSpace`."""
        return None

    @abstractmethod
    def __call__(self, view: View) -> Tensor:
        """The sum over all positions, to be multiplied by the strength."""


@dataclass(frozen=True)
class GroupLasso(PenaltyMethod):
    """The length of each group, weighted by the root of its size.

    >>> import torch
    >>> view = View(torch.tensor([16.0, 0.0]), torch.tensor([4.0, 4.0]), None, torch.tensor([False, False]), 0)
    >>> GroupLasso()(view)
    tensor(8.)

    Yuan and Lin, "Model selection and estimation in regression with grouped variables" (2006); on the filters of
    networks, Wen et al., "Learning structured sparsity in deep neural networks" (2016).
    """

    def __call__(self, view: View) -> Tensor:
        alive = view.squares != 0  # the root has no derivative at zero, and there is nothing to make smaller
        return (view.sizes.sqrt()[alive] * view.squares[alive].sqrt()).sum()


@dataclass(frozen=True)
class GReg(PenaltyMethod):
    """Weight decay of the groups that have to go, which grows with every step.

    >>> import torch
    >>> view = View(torch.tensor([16.0, 4.0]), torch.tensor([4.0, 4.0]), None, torch.tensor([False, True]), 10)
    >>> GReg(grow=1.0)(view)  # 10 times half of 4
    tensor(20.)

    After `step` steps the decay is `grow · step`. Wang et al., "Neural pruning via growing regularization" (2021).
    """

    grow: float = 0.1
    needs_target = True

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, grow=a_number(least=0))

    def __call__(self, view: View) -> Tensor:
        return 0.5 * self.grow * view.step * view.squares[view.doomed].sum()


@dataclass(frozen=True)
class HalfSpace(PenaltyMethod):
    """The group lasso, and groups that a step has turned by more than `epsilon` allows become zero.

    >>> HalfSpace(epsilon=0.0).half_space
    0.0

    A group is set to zero where ⟨after, before⟩ < epsilon · ‖before‖², that is, where the step left the half-space
    that it began in. Chen et al., "Only Train Once" (2021).
    """

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, epsilon=a_number(least=0, below=1))

    @property
    def half_space(self) -> float:
        """Epsilon."""
        return self.epsilon

    def __call__(self, view: View) -> Tensor:
        return GroupLasso()(view)


@dataclass(frozen=True)
class Polarization(PenaltyMethod):
    """Draws the scales of batch norms apart: some to zero, the others away from it.

    >>> import torch
    >>> view = View(torch.ones(2), torch.ones(2), torch.tensor([0.0, 1.0]), torch.tensor([False, False]), 0)
    >>> Polarization(t=1.2)(view)  # 1.2 · 1 - (0.5 + 0.5)
    tensor(0.2000)

    R(γ) = t · Σ|γ| - Σ|γ - mean γ|. Zhuang et al., "Neuron-level structured pruning using polarization regularizer"
    (2020). Axes without a batch norm are left out.
    """

    t: float = 1.2
    needs_scales = True

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, t=a_number(least=0))

    def __call__(self, view: View) -> Tensor:
        assert view.scales is not None
        return self.t * view.scales.abs().sum() - (view.scales - view.scales.mean()).abs().sum()
