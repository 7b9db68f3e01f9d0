"""Where ranks wait for each other: each says how it fares, and an error of one is an error of all.

What is said goes through the store that the process group was made with, which a rank can look into without waiting.
So nobody enters a collective that another rank will never reach.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from secateur.compat import default_store
from secateur.distributed.lines import RankLine, listen
from secateur.errors import ApplyError

_POLL = 0.01  # seconds between two looks
_LONG = 1.0  # seconds of waiting after which looks are ten times as rare: they take time from those who work
_BEAT = 1.0  # seconds between two signs of life
_GRACE = 5.0  # seconds for the last of them, at the end of the process
_SILENCE = 30.0  # seconds without any, after which a rank is given up
_DOUBT = 5.0  # seconds without any, if nobody listens where it was
_KNOWN = "raised on every rank"
_LONGEST = 1800.0  # seconds to wait for one that shows life; one that was never heard of: as long as the group does


class _Here:
    """What this process remembers of its meetings."""

    def __init__(self) -> None:
        self.store: Any = None
        self.number = 0
        self.posted: list[int] = []  # numbers of meetings of which what was said is in the store
        self.alone = 0
        self.in_step = 0
        self.inside = 0
        self.group: Any = None
        self.door: Any = None  # what others see closed when this process is gone
        self.lines: dict[int, RankLine] = {}  # to those who were waited for

    def opened(self) -> Any:
        """The store; meetings are counted anew in a new process group."""
        found = default_store()
        if self.store is None or self.store[0] is not found:
            self.store = found, PrefixStore("secateur", found)
            self.number, self.posted, self.group, self.lines = 0, [], None, {}
            self.door, address = listen(dist.get_world_size())
            self.store[1].set(f"line/{dist.get_rank()}", address)
            start_beating(found, dist.get_rank())
        return self.store[1]


_here = _Here()


def ranks() -> int:
    """How many processes share the work; 1 without a process group, and inside of `alone()` and `in_step()`.

    >>> ranks()
    1
    """
    return 1 if _here.in_step else _grouped()


def _grouped() -> int:
    """How many processes make the same calls."""
    grouped = dist.is_available() and dist.is_initialized() and not _here.alone
    return dist.get_world_size() if grouped else 1


def everywhere() -> bool:
    """Whether every rank of the process group, if there is one, does what is done here.

    >>> everywhere()
    True
    """
    return not (dist.is_available() and dist.is_initialized()) or _grouped() == dist.get_world_size()


def present() -> None:
    """Let whoever will wait for this rank know of it; without a process group, nothing."""
    if _grouped() > 1:
        _here.opened()


def group() -> Any:
    """A group of all ranks that sends tensors in main memory, whatever the devices are; made when first asked for."""
    _here.opened()
    if _here.group is None:
        _here.group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return _here.group


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process works by itself, as if there were no process group: for a model that only it has.

    >>> with alone():
    ...     ranks()
    1
    """
    _here.alone += 1
    try:
        yield
    finally:
        _here.alone -= 1


@contextmanager
def in_step() -> Iterator[None]:
    """Inside, each rank does the whole work by itself, and all do the same: only what is measured (`of_first`) is
    that of one of them.

    >>> with in_step():
    ...     ranks()
    1
    """
    _here.in_step += 1
    try:
        yield
    finally:
        _here.in_step -= 1


def of_first(what: str, make: Callable[[], str]) -> str:
    """What rank 0 makes by itself, for all: a measurement, during which the others are idle.

    >>> of_first("measuring", lambda: "3 ms")
    '3 ms'
    """
    if _grouped() == 1:
        return make()
    outer, _here.in_step = _here.in_step, 0
    try:
        meet(what)
        made = ""
        if dist.get_rank() == 0:
            with alone():
                made = make()
        return meet(f"{what}, by rank 0", made)[0]
    finally:
        _here.in_step = outer


@contextmanager
def together(what: str, *, all_come: bool = True) -> Iterator[None]:
    """What is raised inside on one rank is told to the others, who raise at their next meeting.

    Where it may be that one rank does this by itself (`all_come=False`), it is told only after a meeting inside.
    """
    outermost, _here.inside = not _here.inside, _here.inside + 1
    present()
    before = _here.number
    try:
        yield
    except BaseException as error:
        tell = outermost and ranks() > 1 and (all_come or _here.number > before)
        if tell and not _known_to_all(error):
            _post(what, error=f"{type(error).__name__}: {error}")
            _here.number += 1
        raise
    finally:
        _here.inside -= 1


def _between_ranks(message: str) -> ApplyError:
    """An error that every rank has seen, or will see at the same meeting."""
    error = ApplyError(message)
    error.__notes__ = [_KNOWN]
    return error


def _known_to_all(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, was seen by every rank."""
    while error is not None:
        if _KNOWN in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__ or error.__context__
    return False


def meet(what: str, said: str = "") -> list[str]:
    """Wait until every rank is here; what each says, by rank.

    >>> meet("nothing in particular", "hello")
    ['hello']
    """
    if ranks() == 1:
        return [said]
    _post(what, said=said)
    number, _here.number = _here.number, _here.number + 1
    heard: dict[int, dict[str, str]] = {}
    watch = _Watch(_here.opened())
    while len(heard) < ranks():
        for rank in range(ranks()):
            if rank not in heard and (found := _look(number, rank)) is not None:
                heard[rank] = found
                _check(what, rank, found)
        if len(heard) < ranks():
            watch.check(what, [rank for rank in range(ranks()) if rank not in heard])
            time.sleep(_POLL if time.monotonic() - watch.begun < _LONG else 10 * _POLL)
    _forget(number)
    return [heard[rank]["said"] for rank in range(ranks())]


def agreed(what: str, text: str, of: str = "plan") -> None:
    """Refuse, on every rank, where the ranks do not have the same text, which tells them what their plan (`of`) is."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(said := meet(what, digest))) > 1:
        odd = [rank for rank, each in enumerate(said) if each != said[0]]
        raise _between_ranks(
            f"{what}: rank {odd[0]} has another {of} than rank 0. Make it on one rank and send it (plan.to_json()), or "
            "on all from the same weights; a model that only one rank has is cut inside of secateur.distributed.alone()"
        )


def _post(what: str, said: str = "", error: str = "") -> None:
    store, mine = _here.opened(), dist.get_rank()
    store.set(f"{_here.number}/{mine}", json.dumps({"what": what, "said": said, "error": error}))
    _here.posted.append(_here.number)


def _forget(number: int) -> None:
    """Everybody has come to a meeting, so nobody will read any more what was said at those before it."""
    for before in [each for each in _here.posted if each < number]:
        _here.opened().delete_key(f"{before}/{dist.get_rank()}")
        _here.posted.remove(before)


def _look(number: int, rank: int) -> dict[str, str] | None:
    store, key = _here.opened(), f"{number}/{rank}"
    try:
        return json.loads(store.get(key)) if store.check([key]) else None
    except RuntimeError as error:  # of torch.distributed
        raise _between_ranks(f"the process that other ranks meet at is gone: {error}"[:300]) from None


def _check(what: str, rank: int, found: dict[str, str]) -> None:
    if found["error"]:
        raise _between_ranks(f"{what}: rank {rank} failed: {found['error']}")
    if found["what"] != what:
        raise _between_ranks(f"this rank is at {what!r}, rank {rank} at {found['what']!r}; call the same on every rank")


class _Watch:
    """Who is waited for, and when a sign of life was last seen of each."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.begun = time.monotonic()
        self.last: dict[int, tuple[bytes, float]] = {}

    def check(self, what: str, missing: list[int]) -> None:
        """Give up a rank that has stopped."""
        now = time.monotonic()
        if now - self.begun < _BEAT:
            return
        for rank in missing:
            beat = self._read(f"beat/{rank}")
            before, since = self.last.setdefault(rank, (beat, now))
            gone = self._gone(rank, silent=now - since if beat == before else 0.0)
            if gone and _look(_here.number - 1, rank) is None:  # it may have come just before its end
                raise _between_ranks(f"{what}: the process of rank {rank} is gone")
            if beat != before:
                self.last[rank] = beat, now
            elif beat and now - since > _SILENCE:
                silent = f"nothing was heard of rank {rank} for {now - since:.0f} s"
                raise _between_ranks(f"{what}: {silent}; has it stopped?")
            longest = _LONGEST if beat else self.store.timeout.total_seconds()
            if now - self.begun > longest:
                raise _between_ranks(
                    f"{what}: rank {rank} did not come within {longest:.0f} s; call this on every rank, or inside of "
                    "secateur.distributed.alone()"
                )

    def _gone(self, rank: int, silent: float) -> bool:
        """Whether the process of a rank has ended, which was silent for so many seconds."""
        if rank not in _here.lines and (address := self._read(f"line/{rank}")):
            _here.lines[rank] = RankLine(address.decode())
        line = _here.lines.get(rank)
        return line is not None and (line.dead() or (line.refused and silent > _DOUBT))

    def _read(self, key: str) -> bytes:
        return bytes(self.store.get(key)) if self.store.check([key]) else b""


def start_beating(store: Any, rank: int) -> None:
    """Show that this process is there, for as long as it is."""
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(store, rank, ended), daemon=True)
    thread.start()
    atexit.register(_stop_beating, thread, ended)


def _stop_beating(thread: threading.Thread, ended: threading.Event) -> None:
    """Before Python ends: it would tear the thread out of torch's code, which then ends the process with an error."""
    ended.set()
    thread.join(_GRACE)


def _beat(store: Any, rank: int, ended: threading.Event) -> None:
    mine, count = PrefixStore("secateur", store.clone() if hasattr(store, "clone") else store), 0
    while not ended.is_set():
        try:
            mine.set(f"beat/{rank}", str(count))
        except Exception:  # the store is gone, and so is the process group
            return
        count += 1
        ended.wait(_BEAT)


__all__ = ["agreed", "alone", "everywhere", "group", "in_step", "meet", "of_first", "present", "ranks", "together"]
