"""Runs of a model that are taken up where they were left, op by op, whatever the model's code looks like.

Running a model's Python code again is cheap; its large ops are not. So a run is numbered op by op, and to go on with it
from op k the model is simply called again: up to there no op is computed. Views are made as ever, writes into memory
are passed over (it is handed back with what was in it at k), and an op that makes a tensor gives back the one that it
made the first time, if it is read later, or else one with the same shape and strides in memory that nobody reads.
Numbers that the code read out of tensors are handed back. A module that did nothing but to make its result is not even
called, once all of its ops are done (`calls`). At the boundary of a transformer's block that leaves the hidden states
and a few constants to be kept for each batch, in memory or, beyond a limit, in a file. So all batches can go from layer
to layer in turn, in the memory of one of them, and each op is computed once.

What is read later is learnt from one whole run. Where a batch takes another way, all that its code still holds is kept;
where a tensor is read after all that was not kept, or a model writes into memory of its own, the run starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from secateur.calibrate.blame import blamed_on_batch
from secateur.calibrate.calls import Calls
from secateur.calibrate.forms import Done, Nowhere, Read, StorageKey
from secateur.calibrate.products import Parameters
from secateur.calibrate.resume import BatchProgress, BatchRun, NotKept, See
from secateur.calibrate.spill import Spill, as_bytes
from secateur.state.chances import Chances, same_chances
from secateur.state.transaction import Transaction, untouched


@dataclass(frozen=True)
class RunRecord:
    """One whole run: its ops, and after which of them each piece of memory is not read any more."""

    log: list[Done]
    last: dict[StorageKey, float]
    products: list[Read]
    whole: bool  # whether it wrote into nothing but what it made
    calls: Calls  # of modules, which need not be made again

    def stages(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """The products with some parameters in the order of the run, those that read the same data together."""
        found: list[tuple[Any, list[str]]] = []
        for read in self.products:
            if read.name in names:
                if found and found[-1][0] == read.data:
                    found[-1][1].append(read.name)
                else:
                    found.append((read.data, [read.name]))
        return [tuple(together) for _, together in found]

    def begins(self, log: Sequence[Done]) -> bool:
        """Whether the run began with the ops of a log."""
        return len(log) <= len(self.log) and all(a.op is b.op for a, b in zip(log, self.log, strict=False))

    def read(self, log: Sequence[Done]) -> Callable[[StorageKey], bool]:
        """Whether some memory is read after the ops of a log; all of it, for all that is known, if these are others."""
        if not self.begins(log):
            return lambda _: True
        return lambda key: self.last.get(key, -1) >= len(log)


class Runs:
    """The runs of a model on some batches.

    >>> from secateur.calibrate import calibrating
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> seen = []
    >>> def see(step):  # `net[2]` is about to be computed: stop there, and go on from there
    ...     seen.append(step.number)
    ...     if step.product is not None and step.product.name == "2.weight":
    ...         step.hold()
    ...         step.stop()
    ...     return step.run()
    >>> with calibrating(net), Runs(net, [torch.ones(3, 4), torch.zeros(3, 4)]) as runs:
    ...     stopped = [runs.run(number, see) for number in range(2)]
    ...     _ = net[2].weight.zero_(), net[2].bias.fill_(7)
    ...     results = [runs.run(number) for number in range(2)]
    ...     runs.at(0)
    4
    >>> stopped, results[0][0], seen
    ([None, None], tensor([7., 7.]), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])

    Between runs the weights of what is not done may change, and only these. Of what the model changes of itself in a
    run, nothing is left after it. `what` is said in errors, before the batch. `room` is how many bytes may be held in
    memory for all batches together; what is more goes into files in a temporary folder.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], *, what: str = "calibration", room: float = 2**28
    ) -> None:
        self.model, self.batches, self._what = model, batches, what
        self.parameters = Parameters.of(model)
        self.modules = frozenset(map(id, model.modules()))  # not those that a run makes and forgets
        self._before = Transaction(model)
        self.restarts = 0  # how often a run had to start anew
        self._spill = Spill(room)
        self._places = [BatchProgress() for _ in range(len(batches))]
        self._record: RunRecord | None = None
        self.chances = Chances.now()
        self.nowhere = Nowhere()
        self._stuck: set[int] = set()  # batches whose runs cannot be taken up

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._spill.close()
        self._places = []

    @property
    def held(self) -> int:
        """The bytes in memory of what was kept of all batches."""
        return self._spill.held

    def at(self, number: int) -> int:
        """How many ops of a batch's run are done."""
        return self._places[number].done

    def calls(self, place: BatchProgress) -> Calls:
        """The calls of modules that are known, where a run went the way of the recorded one so far."""
        return {} if self._record is None or place.log is not self._record.log else self._record.calls

    def record(self, see: See | None = None) -> RunRecord:
        """What a whole run of the first batch did; `see` sees it."""
        if self._record is None or see is not None:
            run = BatchRun(self, 0, BatchProgress(), {}, see, (), record=True)
            with blamed_on_batch(0, self._what):
                run()
            assert run.last is not None
            self._record = RunRecord(run.log, run.last, run.products, run.whole, run.calls)
        return self._record

    def run(self, number: int, see: See | None = None, keep: Sequence[int] = ()) -> Any:
        """Go on with the run of a batch; what the model puts out (but for caches), or None if it was stopped.

        `see` gets each op that is to be computed and gives its result. `keep` are the numbers of ops whose first
        results it will ask for with `made`.
        """
        self.record()
        place = self._places[number]
        run = BatchRun(self, number, place, self._restored(number), see, keep)
        with blamed_on_batch(number, self._what):
            try:
                return run()
            except NotKept:
                self.restarts += 1
                self._stuck.add(number)
                return BatchRun(self, number, BatchProgress(quiet=run.seen), {}, see, keep, hold=run.held)()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """The model afterwards as before, but for the values of its tensors; these too, if runs write into them."""
        if self._record is None or not self._record.whole:
            with untouched(self.model) as undo:
                undo.keep(*self.model.buffers())
                yield
            return
        with same_chances():
            try:
                yield
            finally:
                self._before.roll_back()

    # what is kept of each batch -------------------------------------------------------------------------------

    def keep(self, number: int, log: list[Done], storages: dict[StorageKey, torch.UntypedStorage] | None) -> None:
        """Keep what a run needs that begins after the ops of a log; all of it is computed again without storages."""
        if storages is None:
            self._places[number] = BatchProgress(quiet=len(log))
            self._spill.drop(f"{number}")
            return
        read = (lambda _: True) if self._record is None or number in self._stuck else self._record.read(log)
        found = {key: storage for key, storage in storages.items() if read(key)}
        devices = {key: storage.device for key, storage in found.items()}
        self._spill.put(f"{number}", {f"{a} {b}": as_bytes(storage) for (a, b), storage in found.items()})
        same = self._record is not None and self._record.log[: len(log)] == log  # then one will do for all batches
        chances = Chances.now()
        kept = None if chances.equals(self.chances) else chances
        shared = self._record.log if same and self._record is not None else log
        self._places[number] = BatchProgress(0, len(log), shared, devices, kept)

    def _restored(self, number: int) -> dict[StorageKey, torch.UntypedStorage]:
        """The memory that was kept."""
        devices, kept = self._places[number].devices, self._spill.get(f"{number}")
        return {(a, b): kept[f"{a} {b}"].to(where).untyped_storage() for (a, b), where in devices.items()}
