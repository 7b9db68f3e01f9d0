"""The examples that need other people's trainers, on a tiny part of data that stands in for theirs."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import secateur as sec

pytestmark = pytest.mark.ecosystem
EXAMPLES = Path(__file__).parents[2] / "examples"


def _main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_bert_heads(tmp_path, monkeypatch):
    """A tiny BERT with a vocabulary of its own, and twenty reviews."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "not"]
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForSequenceClassification(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(model)
    for kind, word in (("pos", "good"), ("neg", "bad")):
        folder = tmp_path / "train" / kind
        folder.mkdir(parents=True)
        for i in range(10):
            (folder / f"{i}_1.txt").write_text(f"a {word} film " * (i + 1))
    net = _main("bert_heads")(str(tmp_path), str(model), 12, 10, str(tmp_path / "out"))
    assert net.bert.encoder.layer[0].attention.self.query.out_features == 16
    small = BertForSequenceClassification.from_pretrained(model)
    sec.load(tmp_path / "out" / "small.safetensors", small)
    ids = torch.tensor([[2, 5, 6, 8, 3]])
    with torch.no_grad():
        assert torch.allclose(small.eval()(ids).logits, net.eval().cpu()(ids).logits, atol=1e-6)


def test_penalty_lightning(tmp_path):
    """Digits in the place of CIFAR-10."""
    import timm
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:64] / 16, dtype=torch.float32).unsqueeze(1).expand(-1, 3, -1, -1)
    data = TensorDataset(F.interpolate(images, size=32), torch.tensor(digits.target[:64]))
    model, part = _main("penalty_lightning")(data, 30, 16, str(tmp_path))
    whole = sec.macs(timm.create_model("resnet10t", num_classes=10), data[0][0][None])
    assert part <= 0.5
    assert sec.macs(model.net, data[0][0][None]) <= 0.5 * whole
