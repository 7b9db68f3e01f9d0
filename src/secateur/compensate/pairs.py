"""The full-size and the cut model on the same batch, stopping at the same products."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from secateur.calibrate import ParameterProduct, Runs, Step
from secateur.calibrate.blame import batch_name
from secateur.calibrate.structure import Structure
from secateur.errors import CalibrationError
from secateur.ops.norm import BATCH_NORMS
from secateur.planning.plans import Plan
from secateur.state.held import named_tensors
from secateur.state.twin import copied
from secateur.surgery.blocks import set_aside


def twin(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of a model to look back at after a cut; it shares the memory of the tensors that the plan cuts.

    Blocks that go are set aside in it: what stays has the names that it will have.
    """
    left = {name: plan.removed.after(name) for name, _ in named_tensors(model)}
    replaced = {id(tensor) for name, tensor in named_tensors(model) if left[name] is None or left[name] in plan.kept}
    try:
        whole = copied(model, lambda tensor: id(tensor) in replaced)
        set_aside(whole, plan.removed)
        return whole
    except Exception as error:  # any code of the user's may run here
        raise CalibrationError(
            f"compensation compares with a copy of the uncut model, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class At:
    """A product in a run (in the full-size model with what came out), and the stream that it will be added to."""

    product: ParameterProduct
    stream: Tensor | None
    out: Tensor | None = None


@dataclass(frozen=True)
class Both:
    """The same product in the full-size and in the cut model."""

    whole: At
    cut: At


class Pairs:
    """Both models on the same batches, from stop to stop."""

    def __init__(self, whole: Runs, cut: Runs, found: tuple[Structure, Structure]) -> None:
        self.batches = cut.batches
        self._whole, self._cut, self._found = whole, cut, found

    def stages(self, stops: Collection[str], norms: Collection[str]) -> list[tuple[str, ...]]:
        """Where all batches stop, in the order of the run: products that read the same data together, and norms."""
        order = {read.name: read.number for read in self._cut.record().products}
        order |= {name: self._found[1].norms_at[name] for name in norms}
        found = [*self._cut.record().stages(stops), *((name,) for name in norms)]
        return sorted(found, key=lambda names: order[names[0]])

    def products(self, names: Collection[str], batch: int, see: Callable[[Both], None]) -> None:
        """Go on with a batch to some products, and show both sides of each; only the cut model's will run again."""
        made: dict[str, At] = {}

        def whole(step: Step) -> Any:
            product = step.product if step.name in names else None
            out = step.run()
            if product is not None:
                made[product.name] = At(product, self._stream(0, step, product.name), out)
                if len(made) == len(names):
                    step.hold()
                    step.stop()
            return out

        left = set(names)

        def cut(step: Step) -> Any:
            name = step.name
            if name in left:
                if len(left) == len(names):
                    step.hold()
                product = step.product
                assert product is not None
                see(Both(made[name], At(product, self._stream(1, step, name))))
                left.remove(name)
                if not left:
                    step.stop()
            return step.run()

        self._whole.run(batch, whole, self._streams(0, names))
        missing = set(names) - made.keys()
        if not missing:
            self._cut.run(batch, cut, self._streams(1, names))
            missing = left
        if missing:
            raise CalibrationError(
                f"{batch_name(batch)} does not come to {', '.join(sorted(missing))}, and the first batch does: where a "
                "model goes by its data, give batches on which it goes the same way"
            )

    def norm(self, name: str, batch: int, see: Callable[[Tensor], None]) -> None:
        """Go on with a batch of the cut model to a batch norm, and show what it reads."""

        def cut(step: Step) -> Any:
            if step.op in BATCH_NORMS and self._cut.parameters.name(step.args[3]) == name:
                step.hold()
                see(step.args[0])
                step.stop()
            return step.run()

        self._cut.run(batch, cut)

    def results(self, batch: int) -> tuple[Any, Any]:
        """What both models put out."""
        return self._whole.run(batch), self._cut.run(batch)

    def _stream(self, side: int, step: Step, name: str) -> Tensor | None:
        residual = self._found[side].residuals.get(name)
        return None if residual is None else step.made(residual.other)

    def _streams(self, side: int, names: Collection[str]) -> list[int]:
        """The numbers of the ops that make what products are added to."""
        residuals = [self._found[side].residuals.get(name) for name in names]
        return [residual.other for residual in residuals if residual is not None]
