"""Tracing and cutting, beside a bare fake-tensor run and beside Torch-Pruning.

    python benchmarks/engine.py trace [--quick]     what `trace` costs, beside the bare run and DependencyGraph
    python benchmarks/engine.py cut [--quick]       plan + apply without verify, beside Torch-Pruning's build + step

Every figure is measured in this run, each library in a process of its own. A goal that is missed is printed as such.
Extra memory is the most that the process has above what it had before, once a tiny model was cut (which loads code);
it may be the size of the new model and of one tensor, the largest of the original.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _side_by_side import in_own_process, load_torchvision, seconds_and_peak

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TIME_LIMIT = 120  # seconds that the peer may take


def _image(name: str) -> tuple[nn.Module, Any]:
    return load_torchvision().models.get_model(name).eval(), torch.zeros(1, 3, 224, 224)


def _llama(layers: int, width: int, device: str = "cpu") -> tuple[nn.Module, Any]:
    load_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=width * 11 // 4, num_attention_heads=width // 64
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    return model, {"input_ids": torch.zeros(1, 32, dtype=torch.long)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet18": lambda: _image("resnet18"),
    "resnet50": lambda: _image("resnet50"),
    "vit_b_16": lambda: _image("vit_b_16"),
    "densenet121": lambda: _image("densenet121"),
    "densenet201": lambda: _image("densenet201"),
    "llama 2 layers": lambda: _llama(2, 256),
    "llama 1B": lambda: _llama(16, 2048),
    "llama 7B, meta": lambda: _llama(32, 4096, "meta"),
}


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), example) if isinstance(example, dict) else ((example,), {})


def bare_run(model: nn.Module, example: Any) -> float:
    """Seconds of the same fake-tensor run with nobody watching."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = _call(example)
    start = time.perf_counter()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    state = {name: mode.from_tensor(tensor.detach(), static_shapes=True) for name, tensor in tensors}
    fake = [mode.from_tensor(arg) for arg in args], {k: mode.from_tensor(v) for k, v in kwargs.items()}
    with mode, torch.no_grad():
        torch.func.functional_call(model, state, tuple(fake[0]), fake[1])
    return time.perf_counter() - start


def work(task: str, name: str) -> dict[str, float]:
    """Run one task in this process and measure it."""
    torch.set_num_threads(1)
    model, example = MODELS[name]()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if task == "trace":
        return _trace(model, example, rounds=2 if name.endswith("meta") else 7)
    if task == "cut":
        return _cut(model, example)
    signal.alarm(TIME_LIMIT)
    return _peer(task, model, example)


def _trace(model: nn.Module, example: Any, rounds: int) -> dict[str, float]:
    """The bare run and the trace in turns: other work on the machine only ever adds time to either."""
    import secateur as sec

    torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel would hide from the bare run what trace looks into
    best = {"seconds": float("inf"), "bare": float("inf")}
    graph = sec.trace(model, example)
    for _ in range(rounds):
        best["bare"] = min(best["bare"], bare_run(model, example))
        start = time.perf_counter()
        graph = sec.trace(model, example)
        best["seconds"] = min(best["seconds"], time.perf_counter() - start)
    return {**best, "ops": graph.ops}


def _cut(model: nn.Module, example: Any) -> dict[str, float]:
    import secateur as sec

    tiny = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3))
    sec.apply(tiny, sec.plan(sec.trace(tiny, torch.zeros(1, 3, 8, 8)), sec.Ratio(0.5)), verify=False)
    before = sum(p.numel() for p in model.parameters())
    largest = max(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    graph = sec.trace(model, example)
    gc.collect()
    measured = seconds_and_peak(
        lambda: graph,
        lambda g: sec.apply(model, sec.plan(g, sec.Ratio(0.5)), verify=False),
        lambda _: None,
        repeats=1,
    )
    start = time.perf_counter()
    sec.trace(model, example)
    measured["trace"] = time.perf_counter() - start
    tensors = [*model.parameters(), *model.buffers()]
    measured["new"] = sum(t.numel() * t.element_size() for t in tensors)
    measured["largest"] = largest
    measured["left"] = sum(p.numel() for p in model.parameters()) / before
    return measured


def _peer(task: str, model: nn.Module, example: Any) -> dict[str, float]:
    import torch_pruning as tp

    def take(out: Any) -> Any:
        return out.logits if hasattr(out, "logits") else out

    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    inputs = example if isinstance(example, dict) else (example,)
    start = time.perf_counter()
    if task == "peer-trace":
        tp.DependencyGraph().build_dependency(model, inputs, output_transform=take)
        return {"seconds": time.perf_counter() - start}
    pruner = tp.pruner.MagnitudePruner(
        model,
        inputs,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[head],
        output_transform=take,
    )
    pruner.step()
    return {"seconds": time.perf_counter() - start}


def measured(task: str, name: str) -> dict[str, float] | None:
    """What a worker measured; None where it failed or took too long."""
    try:
        return in_own_process(__file__, "--worker", task, name)
    except SystemExit:
        return None


def _seconds(result: dict[str, float] | None) -> str:
    return f"{result['seconds']:9.2f} s" if result else "  failed or > 120 s".rjust(11)


def trace_table(names: list[str]) -> bool:
    """What `trace` costs."""
    met = True
    print(f"{'model':<18}{'ops':>6}{'bare run':>12}{'trace':>12}{'ratio':>8}{'Torch-Pruning':>20}")
    for name in names:
        ours = measured("trace", name)
        peer = None if name.endswith("meta") else measured("peer-trace", name)
        if ours is None:
            print(f"{name:<18} our trace failed")
            met = False
            continue
        bare = {"seconds": ours["bare"]}
        ratio = ours["seconds"] / ours["bare"]
        met &= ratio <= 2 and ours["seconds"] < 60
        columns = f"{_seconds(bare):>12}{_seconds(ours):>12}{ratio:>8.2f}{_seconds(peer):>20}"
        print(f"{name:<18}{int(ours['ops']):>6}{columns}")
    print(f"goal: at most 2x the bare run, 7B in under 60 s: {'met' if met else 'MISSED'}")
    return met


def cut_table(names: list[str]) -> bool:
    """What plan + apply cost."""
    met = small = True
    print(
        f"{'model':<18}{'plan + apply':>14}{'with trace':>12}{'extra memory':>14}{'new model':>11}{'one tensor':>11}"
        f"{'Torch-Pruning':>20}"
    )
    for name in names:
        ours, peer = measured("cut", name), measured("peer-cut", name)
        if ours is None:
            print(f"{name:<18} our cut failed")
            met = False
            continue
        whole = {"seconds": ours["seconds"] + ours["trace"]}
        met &= peer is None or ours["seconds"] <= peer["seconds"]
        small &= ours["peak"] <= ours["new"] + ours["largest"]
        print(
            f"{name:<18}{_seconds(ours):>14}{_seconds(whole):>12}{ours['peak'] / 2**20:>11.0f} MB"
            f"{ours['new'] / 2**20:>8.0f} MB{ours['largest'] / 2**20:>8.0f} MB{_seconds(peer):>20}"
        )
    print(f"goal: plan + apply at most as long as Torch-Pruning's build + step: {'met' if met else 'MISSED'}")
    print(f"goal: extra memory at most the new model and one tensor: {'met' if small else 'MISSED'}")
    return met


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(sys.argv[2], sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["trace", "cut"])
    parser.add_argument("--quick", action="store_true", help="small models only")
    options = parser.parse_args()
    names = ["resnet18", "densenet121", "llama 2 layers"] if options.quick else list(MODELS)
    if options.what == "cut":
        names = [name for name in names if not name.endswith("meta")]
    (trace_table if options.what == "trace" else cut_table)(names)


if __name__ == "__main__":
    main()
