"""What goes wrong when a model is cut in rounds."""

from secateur.errors import SecateurError


class ScheduleError(SecateurError):
    """A schedule, a loop or a distillation cannot do what was asked; the model is as of its last complete round."""
