"""A line to each of the other ranks, which goes dead when its process does.

A process that is busy may be silent for long, and one that was killed says nothing. The kernel tells them apart: it
closes what a process held open as soon as that is gone, and not before. So every rank has a socket that listens (nobody
needs to answer), and whoever waits for a rank is connected to it. For a machine that is gone, or out of reach, nobody
closes anything: the kernel here asks the kernel there (keep-alive), which answers however busy the process is.
"""

from __future__ import annotations

import os
import socket

_PATIENCE = 1.0  # seconds to get a line
_ASKED = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds, seconds, times: gone after 8 s


def listen(ranks: int) -> tuple[socket.socket, str]:
    """A socket that is open for as long as this process lives, and where it is."""
    here = "127.0.0.1" if os.environ.get("MASTER_ADDR", "") in ("127.0.0.1", "localhost") else ""
    door = socket.create_server((here, 0), backlog=2 * ranks)
    return door, f"{here or socket.gethostname()} {door.getsockname()[1]}"


class RankLine:
    """A connection to the socket of another rank.

    One that cannot be made tells little: a name may be that of another machine here, or a wall be in between. Whether
    it was `refused` is known.

    >>> door, address = listen(1)
    >>> line = RankLine(address)
    >>> line.dead()
    False
    >>> door.close()
    >>> line.dead()
    True
    """

    def __init__(self, address: str) -> None:
        self.refused, self._end = False, None  # type: tuple[bool, socket.socket | None]
        host, port = address.split()
        try:
            self._end = socket.create_connection((host, int(port)), _PATIENCE)
            self._end.setblocking(False)
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _ASKED.items():
                if hasattr(socket, option):  # not on every system; there it is asked less often
                    self._end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        except ConnectionRefusedError:  # the machine is there, and nobody listens
            self.refused = True
        except OSError:  # no way there
            pass

    def dead(self) -> bool:
        """Whether the other process is known to be gone."""
        if self._end is None:
            return False
        try:
            return not self._end.recv(1)
        except BlockingIOError:  # nothing was said, and the line is open
            return False
        except OSError:
            return True
