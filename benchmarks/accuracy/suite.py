"""The list: every model that the benchmark cuts."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.accuracy import data, language, models, reviews
from benchmarks.accuracy.tasks import Task, binary_accuracy, binary_loss, flipped, run, supervised
from benchmarks.accuracy.training import Batch, Recipe, draws
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def _take(tokens: language.Tokens, chosen: Any) -> language.Tokens:
    return {name: part[chosen] for name, part in tokens.items()}


def _cosine(model: nn.Module, batch: Batch) -> Tensor:
    return (run(model, batch[0]) * batch[1]).sum(-1).mean()


@torch.inference_mode()
def _mean_cosine(model: nn.Module, batches: list[Batch]) -> float:
    return sum(float(_cosine(model, batch)) for batch in batches) / len(batches)


def _minilm() -> Task:
    """Sentence vectors, compared with those of the uncut model."""
    dense = cache(language.minilm)
    train, test = (cache(lambda part=part: language.sentences(part)) for part in ("train", "test"))

    @torch.no_grad()
    def labelled(tokens: language.Tokens) -> Batch:
        return tokens, dense()(**tokens)

    def calibration(seed: int) -> list[Batch]:
        n = len(train()["input_ids"])
        return [labelled(_take(train(), i)) for i in next(draws(n, 1024, seed=1000 + seed)).split(64)]

    @cache
    def tests() -> list[Batch]:
        return [labelled(_take(test(), slice(i, i + 32))) for i in range(0, 256, 32)]

    def training(seed: int) -> Iterator[Batch]:
        return (labelled(_take(train(), i)) for i in draws(len(train()["input_ids"]), 32, seed))

    return Task(
        name="minilm",
        load=language.minilm,
        calibration=calibration,
        tests=tests,
        training=training,
        loss=lambda model, batch: 1 - _cosine(model, batch),
        score=_mean_cosine,
        recipe=Recipe(60, 32, 2e-4),
        n_screen=256,
        factors=(1.25, 1.5, 2.1),
        show="cosine {:.4f}".format,
    )


def _next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0])[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


@torch.inference_mode()
def _likelihood(model: nn.Module, batches: list[Batch]) -> float:
    return -sum(float(_next_token_loss(model, batch)) for batch in batches) / len(batches)


def _smollm2() -> Task:
    """Perplexity on WikiText-2; the score is the log-likelihood of a token."""
    text = cache(lambda: language.windows("train", 400))

    def batch(chosen: Tensor) -> Batch:
        return text()[chosen], text()[chosen]

    return Task(
        name="smollm2",
        load=language.smollm2,
        calibration=lambda seed: [batch(i) for i in next(draws(400, 16, seed=1000 + seed)).split(2)],
        tests=cache(lambda: [(window, window) for window in language.windows("test", 8).split(1)]),
        training=lambda seed: (batch(i) for i in draws(400, 2, seed)),
        examples=lambda: TensorDataset(*2 * [language.windows("train", 4000)]),
        loss=_next_token_loss,
        score=_likelihood,
        recipe=Recipe(20, 2, 5e-5),
        n_screen=8,
        seeds=1,
        recoveries=0,
        timed=1,
        factors=(1 / 0.9, 1 / 0.8, 1 / 0.7),
        goal=1 / 0.7,
        quantity="parameters",
        show=lambda score: f"perplexity {math.exp(-score):.1f}",
    )


_cifar10 = cache(data.cifar10)
_fashion = cache(data.fashion_mnist)
_ecg5000 = cache(data.ecg5000)
_IMAGES: dict[str, Any] = {"prepare": data.pixels, "n_screen": 1024}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        supervised(
            "resnet56", models.resnet56, _cifar10, Recipe(60, 128, 0.003, "sgd", 5e-4), augment=flipped, **_IMAGES
        ),
        supervised(
            "vgg16",
            models.vgg16,
            _cifar10,
            Recipe(40, 128, 0.003, "sgd", 5e-4),
            augment=flipped,
            recoveries=1,
            **_IMAGES,
        ),
        supervised("mobilenet_v2", models.mobilenet_v2, _fashion, Recipe(100, 128, 3e-4), **_IMAGES),
        supervised("small_vit", models.small_vit, _fashion, Recipe(100, 128, 3e-4), **_IMAGES),
        supervised(
            "imdb_lstm",
            reviews.imdb_lstm,
            reviews.imdb,
            Recipe(100, 128, 5e-4),
            loss=binary_loss,
            score=binary_accuracy,
        ),
        supervised("ecg_lstm", models.ecg_lstm, _ecg5000, Recipe(100, 64, 1e-3), n_calibration=500),
        supervised("ecg_gru", models.ecg_gru, _ecg5000, Recipe(100, 64, 1e-3), n_calibration=500),
        _minilm(),
        _smollm2(),
    )
}
