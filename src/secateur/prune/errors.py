"""What goes wrong with masks. Each error is also the built-in one that `torch.nn.utils.prune` raises."""

from secateur.errors import SecateurError


class PruneError(SecateurError):
    """A mask cannot be made or removed."""


class PruneTypeError(PruneError, TypeError):
    """A mask was asked for with an argument of the wrong type."""


class PruneValueError(PruneError, ValueError):
    """A mask was asked for with an impossible value."""


class PruneAttributeError(PruneError, AttributeError):
    """A mask was asked for on something that the module does not have."""


class PruneParameterError(PruneTypeError, PruneAttributeError):
    """A mask was asked for on a name that is not a parameter of the module."""


class PruneShapeError(PruneError, AssertionError, IndexError, RuntimeError):
    """Importance scores or a mask do not have the shape of the parameter.

    Torch raises one of three built-in errors for that, depending on the function; this is all of them.
    """


class PruneIndexError(PruneError, IndexError):
    """A mask was asked for along a dimension that the parameter does not have."""


class PruneRuntimeError(PruneError, RuntimeError):
    """A norm was asked for that is not one."""


class PruneEmptyError(PruneValueError, PruneRuntimeError):
    """Parameters were to be pruned together, and there are none; torch raises one or the other, by its version."""


class PruneAssertionError(PruneError, AssertionError):
    """A module is not in the state that pruning leaves it in."""
