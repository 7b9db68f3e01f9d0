"""One model that learns, one that teaches, and how far apart they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.calibrate.blame import batch_name, because, because_of_batch
from secateur.calibrate.fisher import of_words, vocabularies
from secateur.calibrate.statistics import has_statistics, statistics_anew
from secateur.compat import BatchNorm
from secateur.compensate.alike import missed
from secateur.errors import TrainingError
from secateur.planning.plans import Plan
from secateur.state.held import named_tensors
from secateur.tracing.examples import arguments, handed_out, tensors_in
from secateur.training.examples import chosen_rows, rows
from secateur.training.features import Correspondence, correspondence, layer_outputs
from secateur.training.holdout import Numbered

_ROUNDING = 0.02  # of what is largest: half precision, and other kernels for other sizes
_CACHED = 2**26  # numbers that the teacher said about batches that are held back, at most, to be kept
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ROWS = 16  # examples of a batch from which on batch norms may learn by its own statistics

NamedTensors = dict[str, Tensor]


@dataclass(frozen=True)
class Said:
    """What a model puts out: the tensors of it; `classes` is the dimension of classes where they are logits."""

    tensors: tuple[Tensor, ...]
    classes: int | None = None

    def apart(self, other: Said) -> Tensor:
        """How far what a model says is from this, what it should say."""
        if self.classes is not None:
            return soft_difference(other.tensors[0], self.tensors[0], self.classes)
        return torch.stack([missed(a, b) for a, b in zip(other.tensors, self.tensors, strict=True)]).mean()

    def check(self, other: Said) -> None:
        """Refuse a model that says something else."""
        ours, theirs = ([tuple(tensor.shape) for tensor in said.tensors] for said in (other, self))
        if not ours or ours != theirs:
            raise TrainingError(
                f"recover: the model puts out tensors of shapes {ours}, the teacher {theirs}; they have "
                "to be the same, and of floating point"
            )


def soft_difference(ours: Tensor, theirs: Tensor, dim: int = -1) -> Tensor:
    """The Kullback-Leibler divergence of what logits say from what they should say, the mean over all positions.

    >>> round(float(soft_difference(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log())), 4)
    0.1308
    """
    wide = torch.promote_types(ours.dtype, torch.float32)
    learnt, wanted = (F.log_softmax(logits.to(wide), dim) for logits in (ours, theirs))
    return F.kl_div(learnt, wanted, reduction="sum", log_target=True) * ours.shape[dim] / ours.numel()


def _same_rows(some: Tensor, every: Tensor, index: Tensor) -> bool:
    """Whether what is said of some rows is, to rounding, what is said of them among all."""
    if not every.ndim or len(every) <= int(index[-1]) or some.shape != (len(index), *every.shape[1:]):
        return False
    wanted = every[index.to(every.device)].float()
    return bool((some.float() - wanted).abs().max() <= _ROUNDING * wanted.abs().max())


def _classes(model: nn.Module, logits: Tensor) -> int | None:
    """Where the classes of logits are; None where they are not those of one choice."""
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    dim = 1 if logits.dim() == 4 else logits.dim() - 1  # of an image, classes come before the pixels
    return dim if kind in (None, "single_label_classification") and logits.shape[dim] > 1 else None


class Lessons:
    """Runs both models on a batch and compares what they put out, and what is inside."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        plan: Plan | None,
        task: Callable[[Any, Any], Tensor] | None,
        inputs: Callable[[Any], Any],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.teacher = model, teacher
        self._vocabularies = vocabularies(teacher)
        self._dtype, self._device = dtype, next(model.parameters()).device.type
        self._plan, self._task, self.inputs = plan, task, inputs
        self._modes = [(module, module.training) for module in model.modules()]
        self._held: Sequence[tuple[Numbered, Said | None]] = ()  # batches, and what the teacher says if that is kept
        self._moving = False  # whether batch norms are in training mode
        self.same = Correspondence()

    def prepare(self, held: Sequence[Numbered]) -> None:
        """Find layers that correspond, on the first batch that is held back; check that both models take them all."""
        self._set_modes()
        with torch.no_grad(), ExitStack() as stack:
            ours, theirs = (stack.enter_context(layer_outputs(model)) for model in (self.model.eval(), self.teacher))
            wanted = self._run(self.teacher, held[0])
            wanted.check(self._run(self.model, held[0]))
            self.same = correspondence(ours, theirs, self._plan)
            count = sum(tensor.numel() for tensor in wanted.tensors)
        keep = count * len(held) <= _CACHED
        with torch.no_grad():
            self._held = [(batch, self._run(self.teacher, batch) if keep else None) for batch in held]

    def loss(self, batch: Numbered) -> Tensor:
        """What training makes smaller; it is computed in a narrow type if there is one."""
        names = list(self.same.layers)
        with layer_outputs(self.model, names) as ours, layer_outputs(self.teacher, names) as theirs, self._narrow():
            with torch.no_grad():
                wanted = self._run(self.teacher, batch)
            output = self._call(self.model, batch)
            total = wanted.apart(self._said(self.model, output)) + self.same.between(ours, theirs)
            return total if self._task is None else total + self._asked(output, batch)

    def _narrow(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self._device, self._dtype)

    @torch.no_grad()
    def by_rows(self, batch: Any) -> bool:
        """Whether rows of a batch are examples: the teacher says of some alone what it says of them among all."""
        self.teacher.eval()
        index = torch.arange(0, rows(batch), 2)
        if len(index) < 2:
            return False
        whole = self._run(self.teacher, (0, batch)).tensors
        try:
            part = self._run(self.teacher, (0, chosen_rows(batch, index))).tensors
        except TrainingError:  # of that size, or taken apart so, it is no batch
            return False
        return all(_same_rows(some, every, index) for some, every in zip(part, whole, strict=True))

    def judged(self) -> float:
        """The mean loss on what is held back: the task's if there is one, else how far the outputs are apart."""
        return fmean(self.losses())

    def losses(self) -> list[float]:
        """Those of each batch that is held back."""
        return self.distances() if self._task is None else self._on_held(lambda out, batch, _: self._asked(out, batch))

    def distances(self) -> list[float]:
        """How far the outputs are from the teacher's on each batch that is held back, whatever the task."""

        def apart(output: Any, batch: Numbered, kept: Said | None) -> Tensor:
            wanted = self._run(self.teacher, batch) if kept is None else kept
            return wanted.apart(self._said(self.model, output))

        return self._on_held(apart)

    @torch.no_grad()
    def _on_held(self, measure: Callable[[Any, Numbered, Said | None], Tensor]) -> list[float]:
        self.model.eval()
        found = [float(measure(self._call(self.model, batch), batch, kept)) for batch, kept in self._held]
        self._set_modes()
        return found

    @property
    def has_task(self) -> bool:
        """Whether there is more to learn than what the teacher does."""
        return self._task is not None

    def move_statistics(self, batch: Numbered, wanted: bool) -> None:
        """Let batch norms learn by the statistics of a batch, if it has examples enough, or by their own."""
        moving = wanted and rows(self.inputs(batch[1])) >= _ROWS
        if moving is not self._moving:
            self._moving = moving
            self._set_modes()

    def take_statistics(self, batches: Iterable[Numbered]) -> bool:
        """Give batch norms the mean and variance that batches have in this model; False if it has no such layer."""
        if not has_statistics(self.model):
            return False
        with statistics_anew(self.model):
            for batch in batches:
                self._call(self.model, batch)
        return True

    def values(self) -> NamedTensors:
        """What every tensor of the model holds now."""
        return {name: tensor.detach().clone() for name, tensor in named_tensors(self.model)}

    @torch.no_grad()
    def put(self, values: NamedTensors) -> None:
        """Values that the model had."""
        for name, tensor in named_tensors(self.model):
            tensor.data.copy_(values[name])

    def restore_modes(self) -> None:
        """The modules in the modes that they were given in; what they keep for eval mode is made anew."""
        self.model.train()
        for module, mode in self._modes:
            module.training = mode

    def _set_modes(self) -> None:
        """To learn without dropout; batch norms keep their statistics unless told: what learns is what is judged."""
        self.teacher.eval()
        for module in self.model.train().modules():
            stays = isinstance(module, BatchNorm) and not self._moving
            if stays or isinstance(module, _DROPOUT) or hasattr(module, "drop_prob"):  # of whole paths
                module.eval()

    def _run(self, model: nn.Module, batch: Numbered) -> Said:
        return self._said(model, self._call(model, batch))

    def _said(self, model: nn.Module, output: Any) -> Said:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            return Said((logits,), _classes(model, logits))
        found = tuple(tensor for tensor in tensors_in(handed_out(model, output)) if tensor.is_floating_point())
        words = of_words(found, self._vocabularies)
        return Said((words[0],), words[0].dim() - 1) if len(words) == 1 else Said(found)

    def _call(self, model: nn.Module, batch: Numbered) -> Any:
        try:
            args, kwargs = arguments(self.inputs(batch[1]))
            return model(*args, **kwargs)
        except Exception as error:  # any code of the user's may run here
            who = "the teacher" if model is self.teacher else "the model"
            which = batch_name(batch[0])
            raise TrainingError(f"recover: {who} failed on {which}: {because_of_batch(error)}") from error

    def _asked(self, output: Any, batch: Numbered) -> Tensor:
        assert self._task is not None
        try:
            found = self._task(output, batch[1])
        except Exception as error:
            which = batch_name(batch[0])
            raise TrainingError(f"recover: task(output, batch) failed on {which}: {because(error)}") from error
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise TrainingError(
                f"recover: task(output, batch) gave {found!r:.60}; it is a loss, a tensor of one number"
            )
        return found
