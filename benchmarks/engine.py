"""Tracing and cutting, beside a bare fake-tensor run and beside Torch-Pruning.

    python benchmarks/engine.py trace [--quick]     what `trace` costs, beside the bare run and DependencyGraph
    python benchmarks/engine.py cut [--quick]       plan + apply without verify, beside Torch-Pruning's build + step
    python benchmarks/engine.py variants [--quick]  what further runs cost, on parts of the zoo

To see whether a change made either slower, run it beside a checkout of an older commit, which needs no environment:

    git worktree add ../older COMMIT
    python benchmarks/engine.py trace --beside ../older
    python benchmarks/engine.py variants --beside ../older     # all runs of now beside the one run of then

Every figure is measured in this run, each library in a process of its own. A goal that is missed is printed as such.
Extra memory is the most that the process has above what it had before, once a tiny model was cut (which loads code);
it may be the size of the new model and of one tensor, the largest of the original.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _side_by_side import in_own_process, load_torchvision, seconds_and_peak

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TIME_LIMIT = 120  # seconds that the peer may take
MOST = {"trace": 1.1, "cut": 1.1, "variants": 3.0}  # times an older commit's; a tenth is the noise of a busy machine


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


def _timm(name: str) -> tuple[nn.Module, Any]:
    load_torchvision()
    import timm

    return timm.create_model(name).eval(), torch.zeros(1, 3, 224, 224)


def _language(name: str, **sizes: int) -> tuple[nn.Module, Any]:
    load_torchvision()
    import transformers

    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, vocab_size=99, **sizes)).eval()
    words = torch.zeros(1, 16, dtype=torch.long)
    return model, {"input_ids": words, **({"decoder_input_ids": words[:, :4]} if name == "t5" else {})}


ZOO: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "swin_t": lambda: _image("swin_t"),
    "convnext_atto": lambda: _timm("convnext_atto"),
    "deit_tiny": lambda: _timm("deit_tiny_patch16_224"),
    "efficientnet_b0": lambda: _timm("efficientnet_b0"),
    "gpt2": lambda: _language("gpt2", n_layer=4, n_embd=64, n_head=4),
    "bert": lambda: _language("bert", num_hidden_layers=4, hidden_size=64, num_attention_heads=4),
    "t5": lambda: _language("t5", d_model=64, num_layers=3, num_heads=4, d_kv=16),
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
    model, example = {**MODELS, **ZOO}[name]()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if task == "trace":
        return _trace(model, example, rounds=2 if name.endswith("meta") else 7)
    if task == "cut":
        return _cut(model, example)
    if task == "variants":
        return _variants(model, example)
    if task.startswith("only-"):
        return {"seconds": min(_processor_time(task, model, example) for _ in range(5))}
    signal.alarm(TIME_LIMIT)
    return _peer(task, model, example)


def _trace(model: nn.Module, example: Any, rounds: int) -> dict[str, float]:
    """The bare run and the trace in turns: other work on the machine only ever adds time to either."""
    import secateur as sec

    torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel would hide from the bare run what trace looks into
    best = {"seconds": float("inf"), "bare": float("inf"), "variants": float("inf")}
    graph = sec.trace(model, example)
    for _ in range(rounds):
        best["bare"] = min(best["bare"], bare_run(model, example))
        for what, variants in (("seconds", False), ("variants", True)):
            start = time.perf_counter()
            graph = sec.trace(model, example, variants=variants)
            best[what] = min(best[what], time.perf_counter() - start)
    return {**best, "ops": graph.ops}


def _variants(model: nn.Module, example: Any, rounds: int = 3) -> dict[str, float]:
    """Processor time of a trace with one run and with variants, in turns, once both have run."""
    import secateur as sec

    best = {False: float("inf"), True: float("inf")}
    for i in range(rounds + 1):
        for variants in best:
            gc.collect()
            start = time.process_time()
            sec.trace(model, example, variants=variants)
            best[variants] = min(best[variants], time.process_time() - start) if i else best[variants]
    return {"one": best[False], "variants": best[True]}


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


def _processor_time(task: str, model: nn.Module, example: Any) -> float:
    """Of a trace with one run or with all, or of plan + apply; with older versions of the library, too."""
    import secateur as sec

    knows = "variants" in inspect.signature(sec.trace).parameters
    how = {"variants": task == "only-variants"} if knows else {}
    model = copy.deepcopy(model) if task == "only-cut" else model
    gc.collect()
    start = time.process_time()
    graph = sec.trace(model, example, **how)
    if task != "only-cut":
        return time.process_time() - start
    start = time.process_time()
    sec.apply(model, sec.plan(graph, sec.Ratio(0.5)), verify=False)
    return time.process_time() - start


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


def beside(older: Path, task: str, names: list[str], rounds: int = 2) -> bool:
    """This library and that of another checkout, in turns: the processor time of the best of all rounds."""
    trees, ratios, most = (older.resolve(), Path(__file__).resolve().parents[1]), [], MOST[task]
    print(f"{'model':<18}{'then':>12}{'now':>12}{'ratio':>8}")
    for name in names:
        best = [float("inf")] * len(trees)
        for _ in range(rounds):
            for i, tree in enumerate(trees):
                found = in_own_process(__file__, "--worker", f"only-{task}", name, source=tree / "src")
                best[i] = min(best[i], found["seconds"])
        then, now = best
        ratios.append(now / then)
        print(f"{name:<18}{then:>10.2f} s{now:>10.2f} s{ratios[-1]:>8.2f}", flush=True)
    print(f"{task}: {statistics.geometric_mean(ratios):.2f} of the time that it took, in the geometric mean")
    print(f"goal: at most {most}x: {'met' if max(ratios) <= most else 'MISSED'}")
    return max(ratios) <= most


def _seconds(result: dict[str, float] | None) -> str:
    return f"{result['seconds']:9.2f} s" if result else "  failed or > 120 s".rjust(11)


def trace_table(names: list[str]) -> bool:
    """What `trace` costs."""
    met = True
    titles = f"{'bare run':>12}{'one run':>12}{'ratio':>8}{'variants':>12}{'ratio':>8}{'Torch-Pruning':>20}"
    print(f"{'model':<18}{'ops':>6}{titles}")
    for name in names:
        ours = measured("trace", name)
        peer = None if name.endswith("meta") else measured("peer-trace", name)
        if ours is None:
            print(f"{name:<18} our trace failed")
            met = False
            continue
        bare = {"seconds": ours["bare"]}
        ratio = ours["seconds"] / ours["bare"]
        more = {"seconds": ours["variants"]}
        met &= ratio <= 2 and ours["variants"] < 60 and ours["variants"] <= 3 * ours["seconds"]
        columns = f"{_seconds(bare):>12}{_seconds(ours):>12}{ratio:>8.2f}{_seconds(more):>12}"
        columns += f"{ours['variants'] / ours['seconds']:>8.2f}{_seconds(peer):>20}"
        print(f"{name:<18}{int(ours['ops']):>6}{columns}")
    goal = "one run at most 2x the bare run, with variants at most 3x one run, 7B in under 60 s"
    print(f"goal: {goal}: {'met' if met else 'MISSED'}")
    return met


def variants_table(names: list[str]) -> bool:
    """What variants cost: at most three times the example's own run."""
    ratios = []
    print(f"{'model':<18}{'one run':>12}{'variants':>12}{'ratio':>8}")
    for name in names:
        found = in_own_process(__file__, "--worker", "variants", name)
        ratios.append(found["variants"] / found["one"])
        print(f"{name:<18}{found['one']:>10.2f} s{found['variants']:>10.2f} s{ratios[-1]:>8.2f}", flush=True)
    met = max(ratios) <= 3
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f}, most {max(ratios):.2f}")
    print(f"goal: with variants at most 3x one run: {'met' if met else 'MISSED'}")
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
    parser.add_argument("what", choices=["trace", "cut", "variants"])
    parser.add_argument("--quick", action="store_true", help="small models only")
    parser.add_argument("--only", nargs="+", choices=[*MODELS, *ZOO], metavar="MODEL", help=", ".join([*MODELS, *ZOO]))
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="compare with an older commit of the library")
    options = parser.parse_args()
    names = options.only or (["resnet18", "densenet121", "llama 2 layers"] if options.quick else list(MODELS))
    if options.what == "cut":
        names = [name for name in names if not name.endswith("meta")]
    if options.what == "variants" and not options.only:
        names = ["resnet18", "densenet121", "llama 2 layers", *([] if options.quick else ZOO)]
    if options.beside is not None:
        sys.exit(not beside(options.beside, options.what, names))
    {"trace": trace_table, "cut": cut_table, "variants": variants_table}[options.what](names)


if __name__ == "__main__":
    main()
