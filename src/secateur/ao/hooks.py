"""What a kind of sparsifier may add to the common course of events."""

from torch import nn

from secateur.ao.config import Group


class Hooks:
    """Each method is called at one point by `BaseSparsifier` and does nothing unless overridden."""

    def _check_tensor(self, group: Group) -> None:
        """Raise if the group's tensor cannot be masked in this way. Asked before masks are attached."""

    def _check(self, group: Group) -> None:
        """Raise if the group's settings make no sense. Asked before masks are attached and before a step."""

    def _attach_bias(self, group: Group, parametrization: nn.Module) -> None:
        """Let the bias follow the mask that was just attached to its weight."""

    def _detach_bias(self, group: Group) -> None:
        """Make final what `_attach_bias` did, just before the weight's mask is."""

    def _after_step(self) -> None:
        """Called when all masks are updated."""
