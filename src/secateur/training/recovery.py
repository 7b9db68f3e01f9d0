"""What was lost in a cut, learnt again from the uncut model: distillation that chooses its own rate and length.

Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network" (2015), for outputs; Romero et al., "FitNets"
(2015), for what is inside.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from secateur.arguments import PATH, SEED, Rule, a_function, a_number, an_int, check, optional
from secateur.calibrate.blame import check_values
from secateur.calibrate.data import like
from secateur.errors import TrainingError
from secateur.pipeline.apply import plan_of
from secateur.state.held import named_tensors
from secateur.state.transaction import transaction, untouched
from secateur.tracing import unwrap
from secateur.training.budget import StepBudget
from secateur.training.checkpoint import RecoveryCheckpoint
from secateur.training.holdout import TrainingData
from secateur.training.lessons import Lessons
from secateur.training.outcome import Recovered
from secateur.training.rounds import Search

TaskLoss = Callable[[Any, Any], Tensor]


_RULES = {
    "minutes": a_number(above=0),
    "steps": optional(Rule("how many to take at most, from 1 on", an_int(1).holds)),
    "task": optional(a_function("a function of what the model puts out and a batch")),
    "checkpoint": optional(PATH),
    "dtype": optional(Rule("torch.bfloat16, to train faster", lambda dtype: dtype is torch.bfloat16)),
    "seed": SEED,
}


def recover(
    model: nn.Module,
    teacher: nn.Module,
    batches: Any,
    *,
    minutes: float = 10,
    steps: int | None = None,
    task: TaskLoss | None = None,
    example: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Recovered:
    """Train a cut model, in place, to do again what the uncut one does; it never ends worse than it began.

    >>> import copy, secateur as sec, torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> teacher = copy.deepcopy(net)
    >>> _ = sec.apply(net, sec.plan(sec.trace(net, torch.zeros(1, 8)), sec.Macs(0.5)))
    >>> found = sec.recover(net, teacher, [torch.randn(64, 8) for _ in range(20)], minutes=0.5, steps=200)
    >>> found.after < 0.5 * found.before
    True

    It needs no labels: what counts is how far the model's outputs are from those of `teacher`, and inside of it those
    of layers that still correspond. With labels, `task(output, batch)` is a loss of what the model puts out for a whole
    batch, such as `lambda output, batch: F.cross_entropy(output, batch[1])`, and counts as well. What a batch has
    beyond the example that the model was traced with (or `example`) is not given to the model.

    A tenth of the data is held back, and left out of later batches where it comes again. On it a few short trials
    choose the learning rate, and rounds follow, each four times as long as the one before, each with a rate that falls
    to zero, until one brings nothing, or the time (`minutes`) or the number of `steps` is used up. `before` and `after`
    of the report are measured on what was held back, and the model is left at the best that was found, or as it was if
    that may be better by chance. Dropout layers are off meanwhile. Batch norms take their statistics anew at first,
    where that is better (a round of no steps in the report), and learn in training mode in rounds of 500 steps or more.

    `dtype=torch.bfloat16` trains in mixed precision (`torch.autocast`), which processors with instructions for it do
    several times as fast: weights stay as wide as they are, and so does all that is judged.

    With `checkpoint`, a file, each round is kept there; the same call in a new process goes on from it. If anything
    goes wrong, an interrupt too, the model is as it was.
    """
    check("recover", TrainingError, locals(), **_RULES)
    inner, uncut = unwrap(model), unwrap(teacher, name="teacher")
    _check_models(model, inner, uncut)
    plan = plan_of(inner)
    wanted = example if example is not None or plan is None else plan.example
    lessons = Lessons(inner, uncut, plan, task, lambda batch: batch if wanted is None else like(wanted, batch), dtype)
    budget = StepBudget(time.perf_counter() + 60 * minutes, math.inf if steps is None else steps)
    with untouched(uncut), transaction(inner) as undo:
        undo.keep_all()
        data = TrainingData(batches, lessons.inputs, lessons.by_rows)
        lessons.prepare(data.held)
        kept = None if checkpoint is None else RecoveryCheckpoint.of(checkpoint, inner, seed)
        found = Search(lessons, data, budget, seed, kept).run()
        lessons.restore_modes()
    return found


def _check_models(model: nn.Module, inner: nn.Module, uncut: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise TrainingError("recover: it trains in one process; pass the model inside, `model.module`, on one rank")
    for each in (inner, uncut):
        check_values(each, (*each.parameters(), *each.buffers()), "recover")
    ours, theirs = ({id(t): name for name, t in named_tensors(m) if t.numel()} for m in (inner, uncut))
    shared = ours.keys() & theirs.keys()
    if shared:
        raise TrainingError(
            f"recover: the teacher has the model's own {ours[next(iter(shared))]}, so that it would change with it; "
            "make a copy before the cut, `teacher = copy.deepcopy(model)`"
        )
    if not any(p.requires_grad for p in inner.parameters()):
        raise TrainingError("recover: no parameter of the model has requires_grad, so there is nothing to train")
