"""Several runs of models side by side, each stopping where it is asked to, so that one can wait for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class _Abandoned(BaseException):
    """Ends a run that nobody will go on with."""


class Lane:
    """A run that can be paused from within and taken up again; only one lane runs at any time.

    >>> def run(lane):
    ...     for n in range(3):
    ...         lane.pause(n)
    ...     return "done"
    >>> with lanes([run, run]) as (one, two):
    ...     one.advance(), two.advance(), one.advance(), one.advance(), one.advance(), one.result
    (0, 0, 1, 2, None, 'done')
    """

    def __init__(self, run: Callable[[Lane], Any]) -> None:
        self.result: Any = None
        self.finished = False
        self._run = run
        self._event: Any = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._body, daemon=True)

    def advance(self) -> Any:
        """Go on to the next pause; what was handed to it, or None at the end."""
        if self.finished:
            return None
        if not self._thread.is_alive():
            self._thread.start()
        self._event = None
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._event

    def pause(self, event: Any) -> None:
        """Called from within the run: wait here until `advance`."""
        self._event = event
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def take(self) -> Any:
        """The result of a run that is at its end; the lane lets go of it."""
        result, self.result = self.result, None
        return result

    def abandon(self) -> None:
        """End the run wherever it is."""
        self._abandoned = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()
        self._event = self.result = None

    def _body(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                torch.set_num_threads(self._threads)
                with torch.no_grad():
                    self.result = self._run(self)
        except _Abandoned:
            pass
        except BaseException as error:  # goes to whoever advances the lane
            self._error = error
        finally:
            self.finished = True
            self._stopped.release()


@contextmanager
def lanes(runs: Sequence[Callable[[Lane], Any]]) -> Iterator[list[Lane]]:
    """A lane for each run; those that are not at their end afterwards are abandoned."""
    made = [Lane(run) for run in runs]
    try:
        yield made
    finally:
        for lane in made:
            lane.abandon()
