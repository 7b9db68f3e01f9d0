"""One of two processes of torchrun, in which other people's loops train a model while it is pruned.

What each found is written as JSON: {name: [what must be the same on both ranks, and what is right or not]}.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from test_ecosystem_training import EXAMPLE, SMALL, WHATS, Sentences, X, arguments, bert, lightning, module, net
from torch.utils.data import DataLoader, TensorDataset

import secateur as sec
import torchvision_ops  # noqa: F401
from secateur import training


def digest(model):
    """Of the parameters: statistics of batch norms are those of each rank."""
    weights = (p.detach().float() for p in model.parameters())
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in weights)).hexdigest()


def alike(ours, theirs, far=1e-5):
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    return all(a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=far) for a, b in pairs)


def smaller(model, whole, example, log):
    """Whether the log tells what was cut, or how many zeros there are."""
    if "sparsity" in log:
        return abs(log["sparsity"] - 0.8) < 0.03
    return sec.macs(model, example) == log["macs"] < sec.macs(whole, example)


def in_transformers(kind, folder):
    from transformers import Trainer

    steps = 24 if kind == "learned" else 12
    more = {"max_steps": steps, "save_strategy": "steps", "save_steps": steps // 2, "gradient_accumulation_steps": 2}
    more["bf16"] = kind == "cuts"

    def trainer(model, pruning, place):
        given = arguments(folder / place, **more)
        return Trainer(model, given, train_dataset=Sentences(), callbacks=[pruning.transformers()])

    model, pruning = bert(), training.Pruning(WHATS[kind]())
    first = trainer(model, pruning, "a")
    first.train()
    half = folder / "a" / f"checkpoint-{steps // 2}"
    again, other = bert(seed=5), training.Pruning(WHATS[kind]())
    other.resume(again, half / "pruning.safetensors")
    trainer(again, other, "b").train(resume_from_checkpoint=str(half))
    wrapped = type(first.model_wrapped).__name__
    right = [alike(model, again, 1e-3 if more["bf16"] else 1e-5), smaller(model, bert(), EXAMPLE, pruning.log())]
    return [digest(model), digest(again), wrapped], right


def watched(model):
    """What Lightning wraps a model in, while it trains it; it is unwrapped at the end."""
    seen = []
    model.on_train_start = lambda: seen.append(type(model.trainer.strategy.model).__name__)
    return seen


def in_lightning(kind, folder):
    loader = DataLoader(TensorDataset(X), batch_size=8)
    more = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2}
    model, pruning = module(), training.Pruning(SMALL[kind]())
    seen = watched(model)
    lightning(folder / "a", pruning, 24, **more).fit(model, loader)
    file = folder / "a" / "step=12.ckpt"
    state = torch.load(file, weights_only=True)["callbacks"]["SecateurPruning"]
    again, other = module(seed=4), training.Pruning(SMALL[kind]())
    other.resume(again, state)
    lightning(folder / "b", other, 24, **more).fit(again, loader, ckpt_path=str(file))
    right = [alike(model, again), smaller(model.net, net(), X[:1], pruning.log())]
    return [digest(model), digest(again), *seen], right


def averaged_in_lightning(folder):
    """Its own average of the weights is cut along."""
    from pytorch_lightning.callbacks import EMAWeightAveraging

    model, pruning, average = module(), training.Pruning(SMALL["cuts"]()), EMAWeightAveraging(decay=0.5)
    trainer = lightning(folder, pruning, 10, strategy="ddp", devices=2)
    trainer.callbacks.append(average)
    seen = watched(model)
    trainer.fit(model, DataLoader(TensorDataset(X), batch_size=8))
    shapes = [[tuple(p.shape) for p in one.parameters()] for one in (model, average._average_model.module)]
    right = [shapes[0] == shapes[1] != [tuple(p.shape) for p in net().parameters()]]
    return [digest(model), digest(average._average_model.module), *seen], right


def stopped_in_lightning(folder):
    """Where the metric is too low on one rank only."""
    pruning = training.Pruning(SMALL["cuts"](), floor=training.Floor("good", 0.5))
    trainer = lightning(folder, pruning, 16, strategy="ddp", devices=2)
    model, loader = module(), DataLoader(TensorDataset(X), batch_size=8)
    model.validation_step = lambda *_: model.log("good", float(model.global_rank))
    seen = watched(model)
    trainer.fit(model, loader, loader)
    return [trainer.global_step, *seen], [trainer.global_step == 4]


def in_accelerate(kind, folder, precision="no"):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # the precision is that of the process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    rank, found = accelerator.process_index, {}
    for stopped in (False, True):
        model, pruning = net(), training.Pruning(SMALL[kind]())
        if stopped:
            pruning.resume(model, folder / "pruning")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if kind == "masks" and not stopped:
            pruning.begin(model, optimizer)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        if stopped:
            accelerator.load_state(str(folder / "state"))
        if kind != "masks" or stopped:
            pruning.begin(wrapped, optimizer)
        for i in range(24 if stopped else 0, 48):
            x = X[(i * 2 + rank) % 8 * 8 :][:8]
            with accelerator.accumulate(wrapped):
                accelerator.backward(F.mse_loss(wrapped(x), x[:, :3]))
                optimizer.step()
                optimizer.zero_grad()
            pruning.step()
            if i == 23 and not stopped:
                accelerator.save_state(str(folder / "state"))
                if accelerator.is_main_process:
                    pruning.save(folder / "pruning")
                accelerator.wait_for_everyone()
        found[stopped] = accelerator.unwrap_model(wrapped)
        accelerator.free_memory()
    right = [alike(found[False], found[True], 1e-4), smaller(found[False], net(), X[:1], pruning.log())]
    return [digest(found[False]), type(wrapped).__name__, pruning.steps], right


LOOPS = {"transformers": in_transformers, "lightning": in_lightning, "accelerate": in_accelerate}


def main(folder):
    found = {
        f"{loop} {kind}": tried(run, kind, folder / loop / kind)
        for loop, run in LOOPS.items()
        for kind in ("cuts", "learned", "masks")
    }
    found["lightning averages"] = tried(averaged_in_lightning, folder / "averages")
    found["lightning floor"] = tried(stopped_in_lightning, folder / "floor")
    found["accelerate bf16"] = tried(in_accelerate, "cuts", folder / "bf16", "bf16")
    (folder / os.environ["RANK"]).write_text(json.dumps(found))


def tried(run, *given):
    try:
        return run(*given)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], [False]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
