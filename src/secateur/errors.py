"""Everything that goes wrong, by name. A message says where, what, and what to do."""


class SecateurError(Exception):
    """The root of every error that Secateur raises on purpose.

    >>> import secateur as sec
    >>> issubclass(sec.TraceError, sec.SecateurError)
    True
    """


class SecateurWarning(UserWarning):
    """Something that works, but probably not as meant."""


class TorchError(SecateurError, ImportError):
    """The installed torch lacks something that Secateur needs."""


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


class ScheduleError(SecateurError):
    """A schedule, a loop or a distillation cannot do what was asked; the model is as of its last complete round."""


class TrainingError(SecateurError):
    """Training with pruning cannot do what was asked; nothing has changed."""


class FileError(SecateurError):
    """A file is damaged, hostile, or belongs to another model."""


class MissingPackageError(SecateurError, ImportError):
    """An optional package is not installed; the message ends with the line that installs it."""
