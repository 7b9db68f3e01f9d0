"""Start processes that form a group on this machine, each with a time limit, and collect what each found."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@cache
def server() -> subprocess.Popen[str]:
    """A process that has imported all that ranks need, and forks them: what takes longest is done once."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back to the system at once
        "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE.parent)]),
    }
    command = [sys.executable, str(HERE / "jobs.py")]
    made = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(made.kill)
    return made


def run(world: int, names: list[str], limit: float = 400) -> list[dict[str, Any]]:
    """What jobs find, by rank: {name: result, or the error that it raised}, as far as the rank got."""
    out = Path(tempfile.mkdtemp())
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "SECATEUR_JOBS_OUT": str(out),
        "SECATEUR_JOBS_FOLDER": os.environ.get("SECATEUR_JOBS_FOLDER", ""),
    }
    asked = json.dumps({"world": world, "names": names, "limit": limit, "environment": environment})
    other = server()
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(f"{asked}\n")
    other.stdin.flush()
    assert other.stdout.readline() == "done\n"
    files = [out / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def serve(jobs: dict[str, Any]) -> None:
    """The body of the process that forks: as many ranks as a line of its input says, which are waited for."""
    for line in sys.stdin:
        asked = json.loads(line)
        ranks = [_forked(rank, jobs, asked["names"], asked["environment"]) for rank in range(asked["world"])]
        deadline = time.monotonic() + asked["limit"]
        while ranks := [pid for pid in ranks if os.waitpid(pid, os.WNOHANG)[0] == 0]:
            if time.monotonic() > deadline:
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        print("done", flush=True)


def _forked(rank: int, jobs: dict[str, Any], names: list[str], environment: dict[str, str]) -> int:
    if pid := os.fork():
        return pid
    os.dup2(2, 1)  # what a job prints is no answer
    os.environ.update(environment, RANK=str(rank))
    try:
        work(jobs, names)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def work(jobs: dict[str, Any], names: list[str]) -> None:
    """The body of a rank: one job after the other, with what each returns or raises written down."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name in names:
        torch.manual_seed(0)
        begun = time.monotonic()
        try:
            found[name] = {"result": jobs[name](rank, dist.get_world_size())}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["seconds"] = time.monotonic() - begun
        Path(os.environ["SECATEUR_JOBS_OUT"], f"{rank}.json").write_text(json.dumps(found))
    with contextlib.suppress(RuntimeError):  # a rank was killed on purpose
        dist.barrier()


def result(rank: dict[str, Any], name: str) -> Any:
    """What a rank found in a job that ended well."""
    assert "result" in rank[name], rank[name]
    return rank[name]["result"]
