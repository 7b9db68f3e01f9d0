"""Whether FSDP2 itself, without this library, trains to what one process does: that of torch 2.8 on gloo does not."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import pytest
from processes import result, run


@cache
def trains_right() -> bool:
    return all(result(rank, "by_torch_alone") <= 1e-6 for rank in run(2, ["by_torch_alone"]))


def needs_right_training(test: Callable[..., None]) -> Callable[..., None]:
    """A test that compares with one process is skipped where it fails and torch alone fails, too."""

    @wraps(test)
    def tried(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except AssertionError:
            if trains_right():
                raise
            pytest.skip("FSDP2 of this torch does not train as one process does, without this library, too")

    return tried
