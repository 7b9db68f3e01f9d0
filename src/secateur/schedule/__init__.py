"""Cutting in rounds: schedules, the prune-and-recover loop with checkpoints, and learning from the uncut model.

>>> from secateur import schedule
>>> [schedule.cubic(2)(step) for step in (1, 2)]
[0.875, 1.0]
"""

from secateur.errors import ScheduleError
from secateur.schedule.distill import Distill
from secateur.schedule.loop import cut, iterate
from secateur.schedule.rounds import Iteration, Round
from secateur.schedule.schedules import Schedule, cubic, levels, linear, one_shot

__all__ = ["one_shot", "linear", "cubic", "levels", "Schedule", "iterate", "cut", "Iteration", "Round", "Distill"]
__all__ += ["ScheduleError"]
