"""Everything that goes wrong, by name. A message says where, what, and what to do."""


class SecateurError(Exception):
    """The root of every error that Secateur raises on purpose.

    >>> import secateur as sec
    >>> issubclass(sec.TraceError, sec.SecateurError)
    True
    """


class SecateurWarning(UserWarning):
    """Something that works, but probably not as meant."""


class TraceError(SecateurError):
    """The model could not be run on the example, so nothing is known about it."""


class PlanError(SecateurError):
    """A plan cannot be made, read, or does not belong to this model."""


class ApplyError(SecateurError):
    """A cut could not be carried out; the model is as it was."""


class VerifyError(ApplyError):
    """The cut model does not compute what it should; the model is as it was."""


class CalibrationError(SecateurError):
    """The data that a criterion or a compensation learns from cannot be used; the model is as it was."""


class FileError(SecateurError):
    """A file is damaged, hostile, or belongs to another model."""


class PruneError(SecateurError):
    """A mask cannot be made or removed."""


class PruneTypeError(PruneError, TypeError):
    """A mask was asked for with an argument of the wrong type."""


class PruneValueError(PruneError, ValueError):
    """A mask was asked for with an impossible value."""


class PruneAttributeError(PruneError, AttributeError):
    """A mask was asked for on something that the module does not have."""


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


class PruneAssertionError(PruneError, AssertionError):
    """A module is not in the state that pruning leaves it in."""
