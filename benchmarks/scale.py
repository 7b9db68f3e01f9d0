"""Plans of models that no machine here could hold, on the meta device; checkpoints cut and compressed in their files.

    python benchmarks/scale.py [plans] [files] [smollm2] [--quick]

Each model is built in a process of its own, without weights. Seconds are of this process alone (CPU time, one thread);
those by the wall, of trace and plan together, are beside them. Memory is the most that it ever had. The goals: trace
and plan in 30 s, JSON of 1 MB, apply in 5 s, 1 GB. `smollm2` compresses a real model both from files to files and in
memory, each in a process of its own, and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from _side_by_side import in_own_process, load_torchvision

os.environ.setdefault("HF_HUB_OFFLINE", "1")
T = TypeVar("T")


def _llama_70b(layers: int = 80) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, **heads
    )
    return LlamaForCausalLM(config)


def _qwen3_moe_30b() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = Qwen3MoeConfig(vocab_size=151936, hidden_size=2048, num_hidden_layers=48, **heads, **experts)
    return Qwen3MoeForCausalLM(config)


def _deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama 70B": _llama_70b,
    "Qwen3-MoE 30B": _qwen3_moe_30b,
    "DeepSeek-V3 671B": _deepseek_v3,
    "Llama 70B, 4 layers": lambda: _llama_70b(4),
}


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    made = run()
    return made, time.process_time() - start


def plan_of(name: str) -> dict[str, float]:
    """What the plan of one model takes."""
    import secateur as sec

    torch.set_num_threads(1)
    load_torchvision()
    with torch.device("meta"):
        model = MODELS[name]().eval()
    size = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    graph, traced = _timed(lambda: sec.trace(model, {"input_ids": torch.zeros(1, 32, dtype=torch.long)}))
    plan, planned = _timed(lambda: sec.plan(graph, sec.Ratio(0.3), importance=sec.Random(0)))
    wall = time.perf_counter() - start
    text, written = _timed(plan.to_json)
    back, read = _timed(lambda: sec.Plan.from_json(text))
    _, applied = _timed(lambda: sec.apply(model, back, verify=False))
    return {
        "parameters": size,
        "trace": traced,
        "plan": planned,
        "wall": wall,
        "json": len(text),
        "text": written + read,
        "apply": applied,
        "same": back == plan,
        "left": sum(p.numel() for p in model.parameters()) / size,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def checkpoint(layers: str) -> dict[str, Any]:
    """Cut a checkpoint in several files; memory is what the process took beyond what it had, mapped files included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import secateur as sec

    torch.set_num_threads(1)
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=int(layers), vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    plan = sec.plan(
        sec.trace(model, {"input_ids": torch.zeros(1, 8, dtype=torch.long)}),
        sec.Ratio(0.3),
        importance=sec.Random(0),
    )
    folder = Path(tempfile.mkdtemp())
    try:
        whole = model.to(torch.bfloat16).to_empty(device="cpu")
        size = sum(p.numel() * p.element_size() for p in whole.parameters())
        whole.save_pretrained(folder / "whole", max_shard_size="400MB")
        del whole, model
        start = time.perf_counter()
        sec.cut_checkpoint(folder / "whole", plan, folder / "small")
        seconds = time.perf_counter() - start
        return {"bytes": size, "seconds": seconds, "files": len(list((folder / "whole").glob("*.safetensors")))}
    finally:
        shutil.rmtree(folder)


def compressed(layers: str) -> dict[str, Any]:
    """Compress a checkpoint from files to files; the most memory that it took which is not mapped from files.

    What is held of all layers' second moments at a time, 2 GB, is made small: the model is, too.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    import secateur as sec
    from secateur.importance import reconstruction
    from secateur.verify import run

    torch.set_num_threads(1)
    reconstruction._HELD, run._HELD = 2**24, 2**24
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = Path(tempfile.mkdtemp())
    try:
        whole = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=int(layers), vocab_size=1024))
        size = sum(p.numel() * p.element_size() for p in whole.parameters())
        whole.save_pretrained(folder / "whole", max_shard_size="50MB")
        del whole
        batches = [{"input_ids": torch.randint(1024, (1, 64))} for _ in range(4)]
        peak, start = [_anonymous()] * 2, time.process_time()
        threading.Thread(target=_watch, args=(peak,), daemon=True).start()
        sec.compress_checkpoint(folder / "whole", sec.Params(0.7), batches, folder / "small")
        seconds = time.process_time() - start
        return {
            "bytes": size,
            "seconds": seconds,
            "peak": peak[1] - peak[0],
        }
    finally:
        shutil.rmtree(folder)


def _smollm2_batches() -> list[dict[str, torch.Tensor]]:
    """A few short windows of WikiText-2, so that this ends within minutes; fewer moments are held at a time."""
    from secateur.importance import reconstruction

    reconstruction._HELD = 2**28
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.accuracy import language

    windows = language.windows("train", 4)[:, :128]
    return [{"input_ids": window, "use_cache": False} for window in windows.split(1)]


def smollm2_in_files(told: str) -> dict[str, Any]:
    """Compress SmolLM2-135M, or its first layers, from files to files; the most memory that no file holds."""
    import secateur as sec

    torch.set_num_threads(1)
    batches = _smollm2_batches()
    from benchmarks.accuracy import language

    model = language.smollm2().model
    vars(model.config).pop("quantization_config", None)  # of the file that it came from
    layers, place = told.split(" ", 1)
    model.config.num_hidden_layers = int(layers)
    whole = type(model)(model.config)
    whole.load_state_dict({name: value for name, value in model.state_dict().items() if name in whole.state_dict()})
    whole.save_pretrained(Path(place, "whole"), max_shard_size="100MB")
    del model, whole
    size = sum(file.stat().st_size for file in Path(place, "whole").glob("*.safetensors"))
    peak, start = [_anonymous()] * 2, time.process_time()
    threading.Thread(target=_watch, args=(peak,), daemon=True).start()
    report = sec.compress_checkpoint(Path(place, "whole"), sec.Params(0.8), batches, Path(place, "small"))
    seconds = time.process_time() - start
    Path(place, "plan.json").write_text(report.plan.to_json())
    return {"bytes": size, "seconds": seconds, "peak": peak[1] - peak[0], "params": report.params.after}


def smollm2_in_memory(place: str) -> dict[str, Any]:
    """The same in memory, without turning axes, as files to files does not; and how far apart the two are."""
    from transformers import AutoModelForCausalLM

    import secateur as sec

    torch.set_num_threads(1)
    batches = _smollm2_batches()
    model = AutoModelForCausalLM.from_pretrained(Path(place, "whole"), dtype=torch.float32).eval()
    peak, start = [_anonymous()] * 2, time.process_time()
    threading.Thread(target=_watch, args=(peak,), daemon=True).start()
    importance = sec.Reconstruction(batches)
    report = sec.compress(model, batches[0], sec.Params(0.8), batches, importance=importance, timed=False)
    found = {"seconds": time.process_time() - start, "peak": peak[1] - peak[0]}
    other = sec.load(Path(place, "small"))
    plan = sec.Plan.from_json(Path(place, "plan.json").read_text())
    mine, theirs = model.state_dict(), other.state_dict()
    with torch.no_grad():
        one, two = (each(**batches[0]).logits.double() for each in (model, other.eval()))
    return {
        **found,
        "same plan": plan.kept == report.plan.kept,
        "weights": max(float((mine[name] - theirs[name]).abs().max()) for name in mine),
        "outputs": float((one - two).norm() / one.norm()),
    }


def _anonymous() -> int:
    """Bytes of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def _watch(peak: list[int]) -> None:
    while True:
        peak[1] = max(peak[1], _anonymous())
        time.sleep(0.01)


WORKERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plan": plan_of,
    "checkpoint": checkpoint,
    "compressed": compressed,
    "in files": smollm2_in_files,
    "in memory": smollm2_in_memory,
}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        load_torchvision()
        print(json.dumps(WORKERS[sys.argv[2]](sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, unless some are named")
    parser.add_argument("--quick", action="store_true", help="four layers of one model")
    args = parser.parse_args()
    for part in args.parts or PARTS:
        PARTS[part](args.quick)


def plans(quick: bool) -> None:
    """What the plans of large models take."""
    met = True
    columns = ("trace", "plan", "by the wall", "JSON", "to and from", "apply", "memory", "left")
    print(f"{'model':<22}" + "".join(f"{column:>13}" for column in columns))
    for name in list(MODELS)[3:] if quick else list(MODELS)[:3]:
        found = in_own_process(__file__, "--worker", "plan", name)
        met &= found["trace"] + found["plan"] <= 30 and found["apply"] <= 5
        met &= found["json"] <= 1e6 and found["memory"] < 1e9 and bool(found["same"])
        print(
            f"{name:<22}{found['trace']:>11.1f} s{found['plan']:>11.1f} s{found['wall']:>11.1f} s"
            f"{found['json'] / 1e6:>10.2f} MB{found['text']:>11.1f} s{found['apply']:>11.1f} s"
            f"{found['memory'] / 1e6:>10.0f} MB{found['left']:>13.1%}",
            flush=True,
        )
    print(f"goal: trace + plan in 30 s, JSON of 1 MB, apply in 5 s, under 1 GB: {'met' if met else 'MISSED'}")


def files(quick: bool) -> None:
    """Checkpoints that are cut and compressed in their files."""
    found = in_own_process(__file__, "--worker", "checkpoint", "2" if quick else "20")
    speed = found["bytes"] / found["seconds"] / 1e6
    print(f"checkpoint of {found['bytes'] / 1e9:.2f} GB in {found['files']} files: {speed:.0f} MB/s, disk included")
    for layers in ("1", "4") if quick else ("8", "32"):
        found = in_own_process(__file__, "--worker", "compressed", layers)
        print(
            f"compressed from files to files, {layers} layers of {found['bytes'] / 1e6:.0f} MB: "
            f"{found['peak'] / 1e6:.0f} MB beside the files, {found['seconds']:.0f} s",
            flush=True,
        )


def smollm2(quick: bool) -> None:
    """A real model from files to files and in memory."""
    layers = 2 if quick else 30
    with tempfile.TemporaryDirectory() as place:
        one = in_own_process(__file__, "--worker", "in files", f"{layers} {place}")
        other = in_own_process(__file__, "--worker", "in memory", place)
    for where, found in (("from files to files", one), ("in memory", other)):
        print(
            f"{layers} layers of SmolLM2-135M ({one['bytes'] / 1e6:.0f} MB) {where}: {found['peak'] / 1e6:.0f} MB "
            f"beside files and model, {found['seconds']:.0f} s"
        )
    print(
        f"the same plan: {other['same plan']}; weights differ by {other['weights']:.1e} at most, outputs by "
        f"{other['outputs']:.1e} of their size"
    )


PARTS: dict[str, Callable[[bool], None]] = {"plans": plans, "files": files, "smollm2": smollm2}


if __name__ == "__main__":
    main()
