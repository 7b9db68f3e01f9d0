"""What the library knows of torch's ops: one file per family, one record per op."""

from importlib import import_module

_FAMILIES = "attention contraction convolution create index norm pieces pointwise pool recurrent reduce view"

for _family in _FAMILIES.split():  # each registers its records
    import_module(f"secateur.ops.{_family}")
