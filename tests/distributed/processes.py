"""Start processes that form a group on this machine, each with a time limit, and collect what each found."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(world: int, names: list[str], limit: float = 400) -> list[dict[str, Any]]:
    """What jobs find, by rank: {name: result, or the error that it raised}, as far as the rank got."""
    out = Path(tempfile.mkdtemp())
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE.parent)]),
        "SECATEUR_JOBS_OUT": str(out),
    }
    command = [sys.executable, str(HERE / "jobs.py"), *names]
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(world)]
    deadline = time.monotonic() + limit
    try:
        for process in processes:
            process.wait(timeout=max(deadline - time.monotonic(), 0.1))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    files = [out / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def work(jobs: dict[str, Any]) -> None:
    """The body of such a process: one job after the other, with what each returns or raises written down."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name in sys.argv[1:]:
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
