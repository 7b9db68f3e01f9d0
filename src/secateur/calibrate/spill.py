"""Tensors that are held in memory up to a limit, and in files of a temporary folder beyond it."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from secateur.errors import CalibrationError


class Spill:
    """Sets of tensors of bytes by name; `room` is how many bytes may be in memory.

    >>> with Spill(room=3) as spill:
    ...     spill.put("a", {"x": torch.arange(3, dtype=torch.uint8)})
    ...     spill.put("b", {"x": torch.ones(9, dtype=torch.uint8)})  # into a file
    ...     spill.get("a"), len(spill.get("b")["x"]), spill.held
    ({'x': tensor([0, 1, 2], dtype=torch.uint8)}, 9, 3)
    """

    def __init__(self, room: float) -> None:
        self.held = 0  # bytes in memory
        self._room = room
        self._sets: dict[str, dict[str, Tensor] | Path] = {}
        self._folder: Path | None = None

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget all of it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self.held = None, 0
        self._sets.clear()

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Hold copies of tensors, in the place of what there was under the name."""
        self.drop(name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size and self.held + size > self._room:
            self._sets[name] = self._written(name, {key: tensor.cpu() for key, tensor in tensors.items()})
            return
        self.held += size
        self._sets[name] = {key: tensor.clone() for key, tensor in tensors.items()}

    def get(self, name: str) -> dict[str, Tensor]:
        """Copies of what is held under a name: they may be written into, and those from a file are aligned."""
        found = self._sets.get(name, {})
        tensors = load_file(found) if isinstance(found, Path) else found
        return {key: tensor.clone() for key, tensor in tensors.items()}

    def drop(self, name: str) -> None:
        """Forget what is held under a name."""
        found = self._sets.pop(name, {})
        if isinstance(found, Path):
            found.unlink(missing_ok=True)
        else:
            self.held -= sum(tensor.nbytes for tensor in found.values())

    def _written(self, name: str, tensors: dict[str, Tensor]) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="secateur-"))
        path = self._folder / f"{name}.safetensors"
        try:
            save_file(tensors, path)
        except OSError as error:
            raise CalibrationError(
                f"batch {name} could not be written to {self._folder} ({error}); give fewer or smaller batches, or set "
                "TMPDIR to a folder with more space"
            ) from error
        return path


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Memory as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
