"""One call of a model that takes a run up again: the ops before are given back, those after are computed.

`stages` has the idea.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.calibrate.calls import Calls, ModuleCall, WatchedCall
from secateur.calibrate.forms import (
    MAKE,
    VIEW,
    WRITE,
    Done,
    Read,
    StorageKey,
    StoredView,
    argument_of,
    from_forms,
    memory_of,
    returned,
    tensors,
    to_forms,
    written_to,
)
from secateur.calibrate.observe import call
from secateur.calibrate.products import ParameterProduct, product
from secateur.compat import (
    StorageWeakRef,
    TorchDispatchMode,
    schema,
    storage_id,
    strong_storage,
    tree_map,
    without_modes,
)
from secateur.errors import CalibrationError
from secateur.ops.create import LIFTED
from secateur.ops.product import WHOLE
from secateur.ops.record import part
from secateur.state.chances import Chances
from secateur.state.patches import patched
from secateur.tracing.examples import handed_out, tensors_in

if TYPE_CHECKING:
    from secateur.calibrate.stages import Runs

_CALL: Callable[..., Any] = nn.Module.__call__
_READS = ("tolist", "numpy", "__array__", "__dlpack__")  # ways to a tensor's values that are no ops

See = Callable[["Step"], Any]


class _Stopped(BaseException):
    """Ends a run where it was asked to."""


class NotKept(BaseException):
    """Something is read that was not kept."""


@dataclass
class BatchProgress:
    """How far a batch got."""

    quiet: int = 0  # ops that were seen, but must be computed again
    done: int = 0  # ops that need not be computed again
    log: list[Done] = field(default_factory=list)  # of at least these
    devices: dict[StorageKey, torch.device] = field(default_factory=dict)  # of the memory that was kept
    chances: Chances | None = None


class Step:
    """An op of a run that is about to be computed."""

    def __init__(self, run: BatchRun, number: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.number, self.op, self.args, self.kwargs = number, op, args, kwargs
        self._run = run

    def run(self) -> Any:
        """Compute it."""
        return self._run.computed(self)

    @property
    def name(self) -> str | None:
        """The parameter that it multiplies data with; None if it does not."""
        view = None if self.kwargs else part(self.op, "product")
        return None if view is None else self._run.parameters.name(view(*self.args).weight)

    @property
    def product(self) -> ParameterProduct | None:
        """What it is as a product with a parameter; None if it is none."""
        return None if self.kwargs else product(self.op, self.args, self._run.parameters)

    def made(self, number: int) -> Tensor | None:
        """What another op of the run made, whose number was in `keep`; None if this run went another way."""
        return self._run.made_by.get(number) if self._run.usual() else None

    def hold(self) -> None:
        """Let the next run of this batch begin here: before the op, or after it if it was computed."""
        self._run.hold()

    def stop(self) -> None:
        """End the run here."""
        raise _Stopped


class BatchRun(TorchDispatchMode):
    """One call of the model on one batch."""

    def __init__(
        self,
        runs: Runs,
        number: int,
        place: BatchProgress,
        kept: dict[StorageKey, torch.UntypedStorage],
        see: See | None,
        keep: Sequence[int],
        *,
        record: bool = False,
        hold: int | None = None,
    ) -> None:
        super().__init__()
        self.parameters = runs.parameters
        self.at = 0  # the number of the next op
        self.seen = place.quiet  # how many need not be seen any more
        self.whole = True  # whether it writes into nothing but what it made
        self.products: list[Read] = []
        self.calls: Calls = {} if record else runs.calls(place)
        self.held: int | None = None  # where the next run is to begin
        self.log: list[Done] = place.log[: place.done]
        self.last: dict[StorageKey, float] | None = {} if record else None
        self.made_by: dict[int, Tensor] = {}
        self._runs, self._number, self._see, self._keep = runs, number, see, frozenset(keep)
        self._start, self._chances = place.done, place.chances
        self._hold_at = hold  # of a run that starts anew
        self._kept = kept
        self._storages: dict[int, tuple[StorageKey, StorageWeakRef]] = {}
        self._handed: dict[StorageKey, StorageWeakRef] = {}
        self._writes = 0
        self._fresh = False  # whether the op at hand has been computed

    def __call__(self) -> Any:
        """Run to the end, or to where it is stopped."""
        runs = self._runs
        batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, runs.batches[self._number])
        patches = [(Tensor, name, self._reader(name)) for name in _READS]
        with runs.unchanged(), patched(*patches, (nn.Module, "__call__", self._called)):
            runs.chances.restore()
            try:
                with self:
                    out = call(runs.model, batch)
            except _Stopped:
                return None
        if self.at < self._start:
            raise self._parted(None)
        return self._finished(handed_out(runs.model, out))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WHOLE:
            with self:
                return func.decompose(*args, **kwargs)
        number, self.at, self._fresh = self.at, self.at + 1, False
        if number < self._start:
            out = self._again(number, func, args, kwargs)
        else:
            self._begin()
            if any(map(self._runs.nowhere.has, tensors((args, tuple(kwargs.values()))))):
                raise NotKept
            if self._hold_at is not None and number >= self._hold_at:
                self._hold_at = None
                self.hold()
            quiet, self.seen = number < self.seen, max(self.seen, number + 1)
            step = Step(self, number, func, args, kwargs)
            out = step.run() if self._see is None or quiet else self._see(step)
        if number in self._keep:
            self._keep_result(number, out)
        return out

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A module is called: if all of its ops are done, it need not be."""
        begin, record = self.at, self.last is not None
        known = None if record else self.calls.get((begin, id(module)))
        if known is not None and known.end <= self._start and self._can_pass(begin, known.end):
            self.at = known.end
            with without_modes():
                self._keep_results(begin, known.end)
                return from_forms(known.out, self._tensor)
        watched = WatchedCall(module, (args, kwargs)) if record and id(module) in self._runs.modules else None
        out = _CALL(module, *args, **kwargs)
        if watched is not None and self.at > begin:
            made, key = watched.result(out, self.log[begin:], self._stored), (begin, id(module))
            self.calls[key] = None if made is None or key in self.calls else ModuleCall(self.at, made)
        return out

    def _can_pass(self, begin: int, end: int) -> bool:
        """Whether what was asked for of some ops can be had without them."""
        return all(self.log[number].kind == MAKE for number in self._keep if begin <= number < end)

    def _keep_results(self, begin: int, end: int) -> None:
        for number in self._keep:
            if begin <= number < end:
                self._keep_result(number, from_forms(self.log[number].out, self._tensor))

    def _stored(self, tensor: Tensor) -> StoredView | None:
        """A tensor that an op of this run made, or a view of it."""
        return None if type(tensor) is not Tensor or self._key(tensor) is None else self._form(tensor, (0, 0))

    def _keep_result(self, number: int, out: Any) -> None:
        first = out[0] if isinstance(out, tuple | list) else out
        if isinstance(first, Tensor) and not self._runs.nowhere.has(first):
            self.made_by[number] = first

    def _begin(self) -> None:
        """From here on, numbers are drawn: as if all before had been."""
        if self._chances is not None:
            self._chances.restore()
            self._chances = None

    def _reader(self, name: str) -> Any:
        """A function that reads a tensor without an op; what it finds there belongs to the run like an op's result."""
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.at < self._start and name == "tolist":
                self.at += 1
                if self.log[self.at - 1].op != name:
                    raise self._parted(name)
                return from_forms(self.log[self.at - 1].out, self._tensor)
            if self._runs.nowhere.has(tensor):
                raise NotKept
            self._begin()
            with without_modes():
                found = original(tensor, *args, **kwargs)
            if name == "tolist":
                self._note_reads(self.at, {memory_of(tensor): tensor})
                self.log.append(Done(name, MAKE, found))
                self.at += 1
            return found

        return read

    # ops that were computed before ----------------------------------------------------------------------------

    def _again(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        done = self.log[number]
        if done.op is not func:
            raise self._parted(func)
        if done.kind == VIEW or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if done.kind == WRITE:
            given = [argument_of(func, name, args, kwargs) for name in returned(func) or ()]
            return given[0] if len(given) == 1 else tuple(given) if given else None
        return from_forms(done.out, self._tensor)

    def _tensor(self, form: StoredView) -> Tensor:
        storage = self._kept.pop(form.key, None)
        if storage is None:
            storage = strong_storage(self._handed.get(form.key))
        if storage is None:
            return self._runs.nowhere.tensor(form)
        self._handed[form.key] = StorageWeakRef(storage)
        made = torch.empty(0, dtype=form.dtype, device=form.device)
        made.set_(storage, form.offset, form.shape, form.stride)
        self._storages[storage_id(made)] = form.key, self._handed[form.key]
        return made

    def _parted(self, func: Any) -> CalibrationError:
        was = self.log[min(self.at, self._start) - 1].op
        return CalibrationError(
            f"the model does not do the same when it is called again on batch {self._number}: op {self.at} was {was}, "
            f"now it is {func or 'not there'}. Does it go by something that changes from run to run?"
        )

    # ops that are computed now --------------------------------------------------------------------------------

    def computed(self, step: Step) -> Any:
        """Compute an op and note what it made."""
        number, func = step.number, step.op
        given = {memory_of(tensor): tensor for tensor in tensors((step.args, tuple(step.kwargs.values())))}
        self._note_reads(number, given)
        if self.last is not None and (name := step.name) is not None:
            data = part(func, "product")(*step.args).data  # type: ignore[misc]
            self.products.append(Read(number, name, self._reading(data)))
        out = func(*step.args, **step.kwargs)
        self._fresh = True
        self.log.append(self._done(number, func, step, given, out))
        return out

    def _reading(self, data: Tensor) -> Any:
        """What tells some data from others."""
        return self._key(data), memory_of(data), data.storage_offset(), data.shape, data.stride(), self._writes

    def _done(self, number: int, func: Any, step: Step, given: dict[int, Tensor], out: Any) -> Done:
        if schema(func).is_mutable:
            self._writes += 1
            self.whole &= all(
                self._key(argument) is not None
                for name in written_to(func)
                for argument in tensors(argument_of(func, name, step.args, step.kwargs))
            )
            self.whole &= returned(func) is not None
            return Done(func, WRITE)
        results = list(tensors(out))
        if results and func is not LIFTED and all(memory_of(tensor) in given for tensor in results):
            return Done(func, VIEW)
        count = iter(range(len(results)))
        return Done(func, MAKE, to_forms(out, lambda tensor: self._form(tensor, (number, next(count)))))

    def _form(self, tensor: Tensor, key: StorageKey) -> StoredView:
        if tensor.layout is not torch.strided or type(tensor) is not Tensor:
            self.whole = False
            return StoredView(key, 0, (), (), tensor.dtype, tensor.device, 0)
        key = self._key(tensor) or key
        self._storages[storage_id(tensor)] = key, StorageWeakRef(tensor.untyped_storage())
        where = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        return StoredView(key, *where, tensor.dtype, tensor.device, tensor.untyped_storage().nbytes())

    def _key(self, tensor: Tensor) -> StorageKey | None:
        """Which op of this run made the memory of a tensor; None if none did."""
        key, alive = self._storages.get(memory_of(tensor), (None, None))
        return key if alive is not None and not alive.expired() else None

    def _note_reads(self, number: float, tensors: dict[int, Tensor]) -> None:
        if self.last is not None:
            for tensor in tensors.values():
                key = self._key(tensor)
                if key is not None:
                    self.last[key] = number

    def usual(self) -> bool:
        """Whether the ops so far are those of the recorded run."""
        return self.last is not None or self._runs.record().begins(self.log)

    # where it can be taken up -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep what is needed to go on from here."""
        done = self.at if self._fresh else self.at - 1
        self.held = done
        if not self.whole:
            self._runs.keep(self._number, self.log[:done], None)
            return
        alive = {key: strong_storage(reference) for key, reference in self._storages.values()}
        storages = {key: storage for key, storage in alive.items() if storage is not None}
        self._runs.keep(self._number, self.log[:done], storages)

    def _finished(self, out: Any) -> Any:
        """What is put out is read after all ops; it must be there."""
        wanted = {memory_of(tensor): tensor for tensor in tensors_in(out)}
        if any(self._runs.nowhere.has(tensor) for tensor in wanted.values()):
            raise NotKept
        self._note_reads(float("inf"), wanted)
        return out
