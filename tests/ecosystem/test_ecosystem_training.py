"""The same object in other people's loops: real runs of the real packages."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import secateur as sec
from secateur import prune, training
from secateur.schedule import linear

pytestmark = pytest.mark.ecosystem

TOKENS = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))


class Sentences(Dataset):
    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, i):
        return {"input_ids": TOKENS[i], "labels": int(TOKENS[i, 0] > 25)}


def bert(seed=0):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))


def arguments(folder, **more):
    from transformers import TrainingArguments

    plain = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 2, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 8, "max_steps": 12, "learning_rate": 1e-3, "seed": 1}
    return TrainingArguments(str(folder), **{**plain, **sizes, **more})


EXAMPLE = {"input_ids": TOKENS[:1]}
WHATS = {
    "cuts": lambda: training.Cuts(EXAMPLE, sec.Macs(0.8), every=3, schedule=linear(2)),
    "learned": lambda: training.Learned(EXAMPLE, sec.Macs(0.9), steps=20, strength=1e-3),
    "masks": lambda: training.Masks(training.RigL(0.8, every=2, end=50), protect=("classifier",)),
}


@pytest.mark.parametrize("kind", WHATS)
def test_transformers_trains_logs_and_goes_on(kind, tmp_path):
    from transformers import Trainer

    steps = 24 if kind == "learned" else 12
    more = {"max_steps": steps, "save_strategy": "steps", "save_steps": steps // 2, "gradient_accumulation_steps": 2}
    pruning, model = training.Pruning(WHATS[kind]()), bert()
    trainer = Trainer(
        model, arguments(tmp_path / "a", **more), train_dataset=Sentences(), callbacks=[pruning.transformers()]
    )
    trainer.train()
    log = pruning.log()
    logged = [entry for entry in trainer.state.log_history if log.keys() <= entry.keys()]
    assert logged
    assert logged[-1][next(iter(log))] == pytest.approx(next(iter(log.values())))
    if kind == "masks":
        assert log["sparsity"] == pytest.approx(0.8, abs=0.02)
    else:
        assert sec.macs(model, EXAMPLE) == log["macs"] < sec.macs(bert(), EXAMPLE)

    half = tmp_path / "a" / f"checkpoint-{steps // 2}"
    again, other = bert(seed=5), training.Pruning(WHATS[kind]())
    other.resume(again, half / "pruning.safetensors")
    second = Trainer(
        again, arguments(tmp_path / "b", **more), train_dataset=Sentences(), callbacks=[other.transformers()]
    )
    second.train(resume_from_checkpoint=str(half))
    ours, theirs = model.state_dict(), again.state_dict()
    assert {name: tuple(t.shape) for name, t in ours.items()} == {name: tuple(t.shape) for name, t in theirs.items()}
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), atol=1e-5) for name in ours)


def test_zeros_of_sparsify_stay_in_trainer_and_behind_peft(tmp_path):
    """First the whole model is trained on, then LoRA on `weight_orig`, which PEFT merges behind the masks."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    model, batches = bert().eval(), [{"input_ids": TOKENS[:16]}]
    report = sec.sparsify(model, batches, sec.NM(2, 4), masks=True)
    zeros = {layer.name: model.get_parameter(f"{layer.name}_orig") == 0 for layer in report.layers}
    Trainer(model, arguments(tmp_path), train_dataset=Sentences()).train()
    config = LoraConfig(r=2, target_modules=[], target_parameters=["query.weight_orig", "value.weight_orig"])
    lora = get_peft_model(model, config)
    Trainer(lora, arguments(tmp_path), train_dataset=Sentences()).train()
    lora.eval()
    with torch.no_grad():
        trained = lora(**batches[0]).logits
        merged = lora.merge_and_unload()
        for layer in report.layers:
            prune.remove(merged.get_submodule(layer.name.removesuffix(".weight")), "weight")
        assert torch.allclose(merged(**batches[0]).logits, trained, atol=1e-6)
    assert all(torch.equal(merged.get_parameter(name) == 0, there) for name, there in zeros.items())


def test_transformers_stops_at_the_floor(tmp_path):
    from transformers import Trainer

    pruning = training.Pruning(WHATS["cuts"](), floor=training.Floor("eval_accuracy", 2.0))
    trainer = Trainer(
        bert(),
        arguments(tmp_path, eval_strategy="steps", eval_steps=4),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        callbacks=[pruning.transformers()],
    )
    trainer.train()
    assert trainer.state.global_step == 4


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
SMALL = {
    "cuts": lambda: training.Cuts(X[:1], sec.Macs(0.5), every=3, schedule=linear(2)),
    "learned": lambda: training.Learned(X[:1], sec.Macs(0.5), steps=20, strength=1e-3),
    "masks": lambda: training.Masks(training.SET(0.8, every=2, end=50)),
}


def module(seed=0):
    package = pytest.importorskip("pytorch_lightning")

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net(seed)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return F.mse_loss(self(batch[0]), batch[0][:, :3])

        def validation_step(self, batch, _):
            self.log("good", -1.0)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


def lightning(folder, pruning, steps, **more):
    package = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return package.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[pruning.lightning(), keep],
        **quiet,
        **more,
    )


@pytest.mark.parametrize("kind", SMALL)
def test_lightning_trains_logs_and_goes_on(kind, tmp_path):
    steps, loader = 24, DataLoader(TensorDataset(X), batch_size=16)
    model, pruning = module(), training.Pruning(SMALL[kind]())
    trainer = lightning(tmp_path / "a", pruning, steps)
    trainer.fit(model, loader)
    log = pruning.log()
    assert log.keys() <= trainer.callback_metrics.keys()
    if kind != "masks":
        assert sec.macs(model.net, X[:1]) == log["macs"] <= 0.5 * sec.macs(net(), X[:1])

    file = tmp_path / "a" / "step=12.ckpt"
    state = torch.load(file, weights_only=True)["callbacks"]["SecateurPruning"]
    again, other = module(seed=4), training.Pruning(SMALL[kind]())
    other.resume(again, state)
    lightning(tmp_path / "b", other, steps).fit(again, loader, ckpt_path=str(file))
    assert other.log() == log
    ours, theirs = model.state_dict(), again.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_lightning_stops_at_the_floor(tmp_path):
    loader = DataLoader(TensorDataset(X), batch_size=16)
    trainer = lightning(tmp_path, training.Pruning(SMALL["cuts"](), floor=training.Floor("good", 0.0)), 40)
    trainer.fit(module(), loader, loader)
    assert trainer.global_step == 4


@pytest.mark.parametrize("kind", SMALL)
def test_accelerate_trains_and_goes_on(kind, tmp_path):
    """The state is one of accelerate's own checkpoint."""
    accelerate = pytest.importorskip("accelerate")
    found, logs, steps = {}, [], 24
    for stopped in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model, pruning = net(), training.Pruning(SMALL[kind]())
        if stopped:
            file = tmp_path / "state" / "custom_checkpoint_0.pkl"
            pruning.resume(model, torch.load(file, weights_only=True))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if not stopped:
            pruning.begin(model, optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(pruning)
        if stopped:
            accelerator.load_state(str(tmp_path / "state"))
            pruning.begin(accelerator.unwrap_model(model), optimizer)
        for i in range(12 if stopped else 0, steps):
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(X), X[:, :3]))
            optimizer.step()
            pruning.step()
            if i == 11 and not stopped:
                accelerator.save_state(str(tmp_path / "state"))
        found[stopped] = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
        logs.append(pruning.log())
        assert pruning.steps == steps
    assert logs[0] == logs[1]
    assert all(torch.equal(found[False][name], found[True][name]) for name in found[False])
