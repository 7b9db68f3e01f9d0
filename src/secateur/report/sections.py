"""A model's modules, grouped into sections that are few enough to read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from secateur.report.story import LayerCost


@dataclass(frozen=True)
class Section:
    """Neighbouring modules under one title.

    >>> Section("layer1", ("layer1.0.conv1", "layer1.0.conv2")).title
    'layer1'
    """

    title: str
    modules: tuple[str, ...]


def sections(modules: Sequence[str], limit: int = 12) -> tuple[Section, ...]:
    """The largest subtrees of at most `limit` modules, in order; single modules side by side are joined.

    >>> [section.title for section in sections(["stem", "norm", "body.0.a", "body.0.b", "body.1.a", "head"], limit=2)]
    ['stem … norm', 'body.0', 'body.1.a', 'head']
    """
    under = Counter(prefix for module in modules for prefix in _prefixes(module))
    found: dict[str, list[str]] = {}
    for module in modules:
        top = next((prefix for prefix in _prefixes(module) if under[prefix] <= limit), module)
        found.setdefault(top, []).append(module)
    made: list[Section] = []
    run: list[str] = []
    for title, members in found.items():
        single = len(members) == 1
        if run and (not single or len(run) == limit or _parent(run[0]) != _parent(members[0])):
            made.append(_joined(run))
            run = []
        if single:
            run += members
        else:
            made.append(Section(title, tuple(members)))
    return (*made, *([_joined(run)] if run else []))


def _prefixes(module: str) -> Iterator[str]:
    """`a.b.c`: a, a.b, a.b.c."""
    return accumulate(module.split("."), "{}.{}".format)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _joined(run: list[str]) -> Section:
    return Section(run[0] if len(run) == 1 else f"{run[0]} … {run[-1]}", tuple(run))


def profile(layers: Sequence[LayerCost], most: int = 36) -> tuple[LayerCost, ...]:
    """The costs of layers, summed over the smallest sections of which there are at most `most`.

    >>> layers = [LayerCost(f"body.{i}.{part}", 10, 5) for i in range(3) for part in "ab"]
    >>> [(layer.module, layer.before) for layer in profile(layers, most=4)]
    [('body.0', 20), ('body.1', 20), ('body.2', 20)]
    """
    of_module = {layer.module: layer for layer in layers}
    limit = 1
    while len(found := sections(list(of_module), limit)) > most:
        limit *= 2
    made = []
    for section in found:
        held = [of_module[module] for module in section.modules]
        made.append(LayerCost(section.title, sum(layer.before for layer in held), sum(layer.after for layer in held)))
    return tuple(made)
