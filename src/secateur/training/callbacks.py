"""Adapters to the callbacks of other people's trainers. Their packages are imported only where they are asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.swa_utils import AveragedModel

from secateur.errors import MissingPackageError, TrainingError

if TYPE_CHECKING:
    from secateur.training.pruning import Pruning

TransformersCallback = Any
LightningCallback = Any

FILE = "pruning.safetensors"  # beside the other files of a checkpoint of Transformers


def transformers_callback(pruning: Pruning) -> TransformersCallback:
    """Follows Transformers' Trainer: begins with it, acts after each step, logs, saves with its checkpoints."""
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingPackageError(f"Transformers is not there ({error}); pip install transformers accelerate") from None

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pruning.begin(kwargs["model"], kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pruning.step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and pruning.steps:
                found = pruning.log()
                (logs if logs is not None else {}).update(found)
                if state.log_history:
                    state.log_history[-1].update(found)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            if pruning.stops(metrics or {}):
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if state.is_world_process_zero and folder.is_dir():
                pruning.save(folder / FILE)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pruning.finish()

    return Callback()


def lightning_callback(pruning: Pruning) -> LightningCallback:
    """Follows Lightning's Trainer in the same way; its state is in Lightning's own checkpoints."""
    callback = _lightning().Callback

    class Callback(callback):  # type: ignore[misc,valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise TrainingError(
                    f"pruning follows the steps of one optimizer, and there are {len(trainer.optimizers)}"
                )
            averages = (one for each in trainer.callbacks for one in vars(each).values())
            copies = [one for one in averages if isinstance(one, AveragedModel)]
            pruning.begin(trainer.model, trainer.optimizers[0], copies=copies)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            pruning.step()
            module.log_dict(pruning.log())

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                missed = pruning.stops(trainer.callback_metrics)  # a metric of this rank, maybe
                missed = trainer.strategy.reduce_boolean_decision(missed, all=False)
                trainer.should_stop = trainer.should_stop or missed

        def on_train_end(self, trainer: Any, module: Any) -> None:
            pruning.finish()

        @property
        def state_key(self) -> str:
            return "SecateurPruning"

        def state_dict(self) -> dict[str, Any]:
            return pruning.state_dict()

    return Callback()


def _lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):  # the same, published under two names
        try:
            return importlib.import_module(name)
        except ImportError as error:
            why = error
    raise MissingPackageError(f"Lightning is not there ({why}); pip install lightning")
