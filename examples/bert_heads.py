"""Fine-tune BERT on film reviews (IMDB) with Transformers' Trainer while half of its heads go, a few at a time.

    python examples/bert_heads.py aclImdb bert-base-uncased

The first argument is the folder of the data set (with train/pos and train/neg), the second a model of Transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import secateur as sec
from secateur import training


class Reviews(Dataset):
    """The first `limit` reviews of each kind."""

    def __init__(self, folder: Path, tokenizer: Any, limit: int) -> None:
        kinds = enumerate(("neg", "pos"))
        files = [(path, label) for label, kind in kinds for path in sorted((folder / kind).glob("*.txt"))[:limit]]
        texts = [path.read_text(encoding="utf-8") for path, _ in files]
        self.inputs = tokenizer(texts, truncation=True, padding="max_length", max_length=128, return_tensors="pt")
        self.labels = [label for _, label in files]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**{name: part[i] for name, part in self.inputs.items()}, "labels": self.labels[i]}


def main(folder: str, model: str, steps: int = 3000, limit: int = 12_500, out: str = "bert-half") -> Any:
    """Train and cut; the model."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
    data = Reviews(Path(folder) / "train", tokenizer, limit)
    example = {name: part[:1] for name, part in data.inputs.items()}
    gradual = training.Cuts(example, sec.Ratio({"*heads": 0.5}), every=steps // 6, schedule=sec.schedule.cubic(4))
    pruning = training.Pruning(gradual)
    setting = TrainingArguments(
        out, max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-5, save_strategy="no"
    )
    Trainer(net, setting, train_dataset=data, callbacks=[pruning.transformers()]).train()
    print(f"{pruning.log()['macs_part']:.1%} of the MACs are left")
    sec.save(net, Path(out) / "small.safetensors")
    return net


if __name__ == "__main__":
    main(*sys.argv[1:])
