"""Accuracy after a cut, side by side with Torch-Pruning, on real weights and data: `make bench-accuracy`.

    python -m benchmarks.accuracy                     # everything: hours on two cores
    python -m benchmarks.accuracy --quick             # ResNet-56 and an LSTM at 2.1x, one seed
    python -m benchmarks.accuracy --only vgg16 minilm

For each model and each reduction: every way of Torch-Pruning is screened on a part of the test data, the best of them
and `sec.compress` are scored on all of it and timed beside the uncut model; at the reduction of the goals they are also
fine-tuned for equally many steps, and three seeds draw the calibration data and the order of training. Where Torch-
Pruning cannot cut a model (its own error is in the records), plain magnitude, cut by Secateur, stands in for it.

`packages` fetches, `data`, `reviews` and `language` read, `nets` and `models` are what is cut, `tasks` and `suite` say
how it is judged, `cutting` and `peers` cut, `runner` measures, `store` keeps, `goals`, `plots` and `summary` tell.
Results go to `benchmarks/results/`. An interrupted run writes what it has, and goes on where it was; results are
measured again when the code behind them changes.
"""

from benchmarks._side_by_side import load_torchvision

load_torchvision()  # timm, Transformers and Torch-Pruning import it, and cannot beside a CPU build of torch
