"""Lines between ranks: dead when the other process is, and soon after its machine is out of reach."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from secateur.distributed.lines import RankLine, listen


def test_a_line_is_asked_whether_the_other_machine_is_there(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    door, address = listen(1)
    line = RankLine(address)
    end = line._end
    assert not line.dead()
    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if sys.platform == "linux":
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        first, then, times = (end.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert first + then * times < 10
    door.close()
    assert line.dead()
    assert RankLine(address).refused


OUT_OF_REACH = """
import subprocess, time
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
from secateur.distributed.lines import RankLine, listen
door, address = listen(1)
line = RankLine(address)
assert not line.dead()
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
begun = time.monotonic()
while not line.dead() and time.monotonic() - begun < 30:
    time.sleep(0.1)
print(time.monotonic() - begun)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("ip")) or os.getuid() != 0,
    reason="takes root and a network of its own to take that away",
)
def test_a_machine_that_is_out_of_reach():
    command = ["unshare", "--net", sys.executable, "-c", OUT_OF_REACH]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10


def test_a_process_ends_well_while_it_shows_that_it_is_there() -> None:
    """Python tears threads out of torch's code at its end; where that has begun, the process aborts."""
    code = """
import torch.distributed as dist
from secateur.distributed import meeting
meeting._BEAT = 0
for rank in range(8):
    meeting.start_beating(dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
