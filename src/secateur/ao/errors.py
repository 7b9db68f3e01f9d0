"""What goes wrong with sparsifiers. Each error is also the built-in one that `torch.ao.pruning` raises."""

from secateur.errors import SecateurError


class SparsifierError(SecateurError):
    """A sparsifier, a structured pruner or a sparsity schedule cannot do what was asked."""


class SparsifierTypeError(SparsifierError, TypeError):
    """A sparsifier was given something of the wrong type."""


class SparsifierValueError(SparsifierError, ValueError):
    """A sparsifier was given an impossible value."""


class SparsifierAssertionError(SparsifierError, AssertionError):
    """A sparsity configuration contradicts itself or the model."""


class SparsifierAttributeError(SparsifierError, AttributeError):
    """A sparsifier was pointed at something that the model does not have."""


class SparsifierKeyError(SparsifierError, KeyError):
    """A sparsity configuration lacks an entry."""

    __str__ = Exception.__str__


class SparsifierRuntimeError(SparsifierError, RuntimeError):
    """A saved state does not fit the sparsifier or its model."""


class SparsifierNotImplementedError(SparsifierError, NotImplementedError):
    """A sparsifier was asked for something that it does not offer."""
