"""What is patched is patched for who asked; others never notice."""

from __future__ import annotations

import functools
import math
import random
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sec
from secateur.compat import ScriptFunction
from secateur.state.chances import same_chances
from secateur.state.patches import OWN_ATTENTION, SLOW_ATTENTION, UNSCRIPTED, patched
from state.state_models import Odd

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@functools.cache
def cached(n: int) -> int:
    return n + 1


def elsewhere(function: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_get_the_original() -> None:
    before = math.sqrt, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled, ScriptFunction.__call__
    with patched((math, "sqrt", lambda x: "mine"), SLOW_ATTENTION, OWN_ATTENTION, UNSCRIPTED):
        assert (math.sqrt(4), elsewhere(lambda: math.sqrt(4))) == ("mine", 2.0)
        assert not torch.backends.mha.get_fastpath_enabled()
        assert elsewhere(torch.backends.mha.get_fastpath_enabled)
        with patched((math, "sqrt", lambda x: "inner")):
            assert math.sqrt(4) == "inner"
        assert math.sqrt(4) == "mine"
    assert before == (
        math.sqrt, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled, ScriptFunction.__call__,
    )  # fmt: skip


def test_two_threads_patch_the_same() -> None:
    inside, leave = threading.Event(), threading.Event()
    original, seen = math.sqrt, list[Any]()

    def other() -> None:
        with patched((math, "sqrt", lambda x: "theirs")):
            inside.set()
            leave.wait()
            seen.append(math.sqrt(4))

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with patched((math, "sqrt", lambda x: "mine")):
        assert math.sqrt(4) == "mine"
    assert math.sqrt(4) == 2.0
    assert math.sqrt is not original  # the other thread still asks for its own
    leave.set()
    thread.join()
    assert seen == ["theirs"]
    assert math.sqrt is original


def test_a_cached_function_can_still_be_asked_about_its_cache() -> None:
    import sys

    with patched((sys.modules[__name__], "cached", cached.__wrapped__)):
        assert cached(1) == 2
        assert cached.cache_info().currsize == 0
        cached.cache_clear()


def test_chances_are_as_before() -> None:
    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    with same_chances():
        torch.rand(1), random.random(), np.random.rand()
        assert states() != before
    assert states() == before


def test_another_thread_runs_the_model_while_it_is_traced() -> None:
    """With the same outputs all along, its own attention, caches and functions; and the trace sees the model alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8)).eval()
    x = torch.randn(2, 3, 8)
    alone = sec.trace(net, x)
    want, done, wrong, runs = net(x), threading.Event(), list[Any](), [0]

    def loop() -> None:
        with torch.no_grad():
            while not done.is_set():
                runs[0] += 1
                out = net(x)
                if type(out) is not torch.Tensor or not torch.allclose(out, want, atol=1e-6):
                    wrong.append(out)
                if not torch.backends.mha.get_fastpath_enabled() or math.log2(8) != 3.0:
                    wrong.append("patched")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        graphs = [sec.trace(net, x) for _ in range(5)]
    finally:
        done.set()
        thread.join()
    assert runs[0] > 5
    assert wrong == []
    assert all(graph.axes == alone.axes and graph.blocked == alone.blocked for graph in graphs)


def test_another_thread_traces_too() -> None:
    graphs: list[Any] = []

    def loop() -> None:
        graphs.extend(sec.trace(Odd(), X) for _ in range(3))

    thread = threading.Thread(target=loop)
    thread.start()
    mine = [sec.trace(Odd(), X) for _ in range(3)]
    thread.join()
    assert len({str(graph) for graph in (*graphs, *mine)}) == 1
    assert len(graphs) == 3
