"""IMDB reviews as the word numbers that the trained LSTM was made for, and that LSTM.

The model came with its training script but not with its vocabulary: word numbers follow from counting the words of
the script's own seeded training half, so the text must be cleaned exactly as it was then.
"""

import csv
import re
from collections import Counter
from io import BytesIO, StringIO

import h5py
import numpy
import torch
from benchmarks.accuracy import data, nets, packages
from torch import nn

LENGTH = 100
_N_TEST = 10_000
_STOP_WORDS = """
a about above after again against ain all am an and any are aren as at be because been before being below between both
but by can couldn d did didn do does doesn doing don down during each few for from further had hadn has hasn have haven
having he her here hers herself him himself his how i if in into is isn it its itself just ll m ma me mightn more most
mustn my myself needn no nor not now o of off on once only or other our ours ourselves out over own re s same shan she
should shouldn so some such t than that the their theirs them themselves then there these they this those through to too
under until up ve very was wasn we were weren what when where which while who whom why will with won wouldn y you your
yours yourself yourselves
"""
_STOP = re.compile(rf"\b(?:{'|'.join(_STOP_WORDS.split())})\b\s*")


def words(review: str) -> list[str]:
    """A review's words: no markup, no single letters between spaces, no stop words."""
    text = re.sub(r"<[^>]+>", "", review.lower())
    text = re.sub(r"[^a-zA-Z]", " ", text)
    text = re.sub(r"\s+[a-zA-Z]\s+", " ", text)
    return _STOP.sub("", re.sub(r"\s+", " ", text)).split()


def imdb() -> data.Split:
    """40,000 and 10,000 reviews of at most 100 words (the last ones; zeros after a shorter review)."""
    kept = packages.cache("prepared", "imdb.npz")
    if not kept.exists():
        data.write(kept, **_prepare())
    ids, positive = (torch.from_numpy(numpy.load(kept)[name]) for name in ("ids", "positive"))
    return data.Split(
        ids[_N_TEST:].long(), positive[_N_TEST:].float(), ids[:_N_TEST].long(), positive[:_N_TEST].float()
    )


def _prepare() -> dict[str, numpy.ndarray]:
    (table,) = packages.read(packages.IMDB, "data/raw/a1_IMDB_Dataset.csv")
    rows = list(csv.DictReader(StringIO(table.decode("utf-8"), newline="")))
    order = numpy.random.RandomState(42).permutation(len(rows))  # the script's own shuffle, test part first
    texts = [words(rows[i]["review"]) for i in order]
    counts = Counter(word for text in texts[_N_TEST:] for word in text)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(), start=1)}
    ids = numpy.zeros((len(texts), LENGTH), numpy.int32)
    for row, text in zip(ids, texts, strict=True):
        known = [numbers[word] for word in text if word in numbers][-LENGTH:]
        row[: len(known)] = known
    positive = numpy.array([rows[i]["sentiment"] == "positive" for i in order])
    return {"ids": ids, "positive": positive}


def imdb_lstm() -> nn.Module:
    """An LSTM of 128 units on GloVe vectors, trained in Keras: 85.3% on the 10,000 reviews held out."""
    (raw,) = packages.read(packages.IMDB, "models/sentimentdl_glove_imdb_en.h5")
    with h5py.File(BytesIO(raw)) as file:
        layers = file["model_weights"]
        vectors, dense, cell = layers["embedding/embedding"], layers["dense/dense"], layers["lstm/lstm/lstm_cell"]
        weights = {
            "words.weight": vectors["embeddings:0"][()],
            "rnn.weight_ih_l0": cell["kernel:0"][()].T,  # both libraries order the gates i, f, g, o
            "rnn.weight_hh_l0": cell["recurrent_kernel:0"][()].T,
            "rnn.bias_ih_l0": cell["bias:0"][()],
            "rnn.bias_hh_l0": numpy.zeros_like(cell["bias:0"]),
            "head.weight": dense["kernel:0"][()].T,
            "head.bias": dense["bias:0"][()],
        }
    model = nets.ReviewLstm(len(weights["words.weight"]))
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    model.words.weight.requires_grad_(False)
    return model.eval()
