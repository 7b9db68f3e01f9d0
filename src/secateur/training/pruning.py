"""One object for every loop: a plain one, Transformers' Trainer, Lightning, accelerate."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from secateur.arguments import an_instance, check, optional
from secateur.errors import SecateurWarning, TrainingError
from secateur.planning import Plan
from secateur.state.transaction import transaction
from secateur.surgery.holders import averages, check_wrappers
from secateur.tracing import unwrap
from secateur.training.during import Floor, TrainingRun, What, Work, check_averages
from secateur.training.kept import MALFORMED, keep, kept
from secateur.training.optimizers import check_gradients, check_trains, hooked, inner

if TYPE_CHECKING:
    from secateur.training.callbacks import LightningCallback, TransformersCallback

_KEY = "secateur_pruning"


class Pruning:
    """Cuts, penalties or masks during training, in any loop.

    >>> import torch, secateur as sec
    >>> from secateur import training
    >>> from secateur.schedule import linear
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer, x = torch.optim.Adam(net.parameters()), torch.randn(8, 4)
    >>> pruning = training.Pruning(training.Cuts(x, sec.Macs(0.5), every=5, schedule=linear(2)))
    >>> pruning.begin(net, optimizer)
    >>> for _ in range(12):
    ...     optimizer.zero_grad()
    ...     net(x).square().mean().backward()
    ...     optimizer.step()
    ...     pruning.step()
    >>> net[0].out_features, pruning.log()["macs_part"]
    (8, 0.5)

    `what` is `Cuts(…)`, `Learned(…)` or `Masks(…)`. Call `begin` before the first step and `step` after each, where no
    graph of the model is alive: a cut changes the model, what the optimizer holds, and `copies` of the model such as
    timm's `ModelEmaV3` or torch's `AveragedModel`. `stops(metrics)` says whether the `floor` is missed. Processes that
    train together (DDP) all do the same calls, and cut by the plan of rank 0.

    For Transformers pass `pruning.transformers()` to `Trainer(callbacks=[…])`, for Lightning `pruning.lightning()`.
    With accelerate use it as in a plain loop, and `accelerator.register_for_checkpointing(pruning)`.

    To go on after an interruption build the model at its full size and call `resume(model, state)` with what
    `state_dict()` gave, or the file that `save` wrote, before weights and optimizer are loaded.
    """

    def __init__(self, what: What, *, floor: Floor | None = None) -> None:
        kinds = {"what": an_instance(What, "Cuts(…), Learned(…) or Masks(…)"), "floor": an_instance(Floor, "a Floor")}
        check("Pruning", TrainingError, locals(), what=kinds["what"], floor=optional(kinds["floor"]))
        self.what, self.floor = what, floor
        self.steps = 0
        self._run: TrainingRun | None = None
        self._work: Work | None = None
        self._end: Any = None
        self._metrics: set[str] = set()  # names of those that were asked about

    def begin(self, model: nn.Module, optimizer: Any, *, copies: Sequence[nn.Module] = ()) -> None:
        """Take a model and the optimizer that trains it; after `resume`, those that it was called for."""
        net, found = unwrap(model), inner(optimizer)
        check_trains(found, net)
        self._check_others(net, copies)
        if self._run is None or self._work is None:
            self._run = TrainingRun(net)
            self._work = self.what.work(self._run)
        elif self._run.model is not net:
            raise TrainingError("this is not the model that `resume` was called with; make a Pruning for each model")
        self._run.optimizer, self._run.copies = found, tuple(copies)
        self._work.attach(self._run)
        if self._end is not None:  # of a loop that began and was started anew
            self._end()
        self._end = hooked(found, lambda: self._look(found), self._count)

    def _check_others(self, net: nn.Module, copies: Sequence[nn.Module]) -> None:
        """Refuse what goes with a model and cannot follow it."""
        if self.what.cuts:
            check_wrappers(net)
            check_averages(net, copies)
        elif copies or (self._run is None and averages(net)):
            raise TrainingError(
                "an average of weights whose zeros move has no zeros, and one made before has no masks: make it after "
                "`begin`, as an AveragedModel, which takes over the masks with the buffers, or after `finish`"
            )

    def _look(self, optimizer: Any) -> None:
        if not self.steps:
            check_gradients(optimizer)

    def _count(self) -> None:
        self.steps += 1

    def step(self) -> None:
        """After a step of the optimizer: what is due is done."""
        run, work = self._begun()
        work.after(run, self.steps)

    def stops(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the floor is missed, so that training should end."""
        self._metrics |= set(metrics)
        return self.floor is not None and self.floor.missed(metrics)

    def log(self) -> dict[str, float]:
        """Numbers to log: sparsity, MACs, and what part of the uncut model's MACs these are."""
        return self._begun()[1].log()

    def finish(self) -> None:
        """The end: hooks are gone, zeros are permanent. A floor of a metric that never came is said."""
        if self.floor is not None and self._metrics and self.floor.metric not in self._metrics:
            names = ", ".join(sorted(self._metrics))
            story = (
                f"no metric was ever called {self.floor.metric!r}, so that its floor did nothing; there were {names}"
            )
            warnings.warn(story, SecateurWarning, stacklevel=2)
        if self._work is not None:
            self._work.finish()
        if self._end is not None:
            self._end()
            self._end = None

    def _begun(self) -> tuple[TrainingRun, Work]:
        if self._run is None or self._work is None:
            raise TrainingError("begin(model, optimizer) comes before the first step")
        return self._run, self._work

    # going on --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the weights and the optimizer's state."""
        run, work = self._begun()
        made = "" if run.plan is None else run.plan.to_json()
        return {"steps": self.steps, "plan": made, "work": work.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, where the model has the size that it had then: after `resume`, or without cuts."""
        run, work = self._begun()
        made = "" if run.plan is None else run.plan.to_json()
        if state.get("plan") != made:
            raise TrainingError("the model was cut further when this was saved: call `resume(model, state)` first")
        work.load(state["work"])
        self.steps = int(state["steps"])

    def resume(self, model: nn.Module, state: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Bring a model of full size to the size, and the masks, that it had; weights are loaded afterwards."""
        found = state if isinstance(state, Mapping) else kept(state, _KEY)
        if not {"steps", "plan", "work"} <= found.keys():
            raise TrainingError("this is no state of a Pruning; give what its state_dict() returned")
        run = TrainingRun(unwrap(model))
        with transaction(run.model) as undo:
            undo.keep_all()
            work = self.what.work(run)
            if found["plan"]:
                run.cut(Plan.from_json(found["plan"]))
            try:
                work.load(found["work"])
                steps = int(found["steps"])
            except MALFORMED as error:
                raise TrainingError(f"this is no state of {type(self.what).__name__}(…): {error!r:.80}") from None
        self._run, self._work, self.steps = run, work, steps

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file; without pickle."""
        keep(path, _KEY, self.state_dict())

    # in other people's loops -----------------------------------------------------------------------------------

    def transformers(self) -> TransformersCallback:
        """A `TrainerCallback` that does all of this in Transformers' Trainer."""
        from secateur.training.callbacks import transformers_callback

        return transformers_callback(self)

    def lightning(self) -> LightningCallback:
        """A `Callback` that does all of this in Lightning's Trainer."""
        from secateur.training.callbacks import lightning_callback

        return lightning_callback(self)
