"""Break each mechanism on purpose, one at a time, and see whether a test notices.

    python tools/mutations.py             # all of them, in copies of the source
    python tools/mutations.py leftovers   # those whose name has a word in it

A mutation takes a function's body away and puts one line in its place. It is noticed if one of the tests that are
named beside it fails; one that none of them notices is printed as SURVIVES, and the exit code is 1.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEYOND, STYLES = "tests/beyond", "tests/fuzz/test_styles.py"


@dataclass(frozen=True)
class Mutation:
    """What a function does instead, and the tests that should fail then."""

    function: str  # of which file: "tracing/graph.py:_keep_given"
    instead: str
    tests: str


MUTATIONS = [
    # what one run does not show
    Mutation("tracing/runs.py:join", "return None", BEYOND),
    Mutation("tracing/variants.py:Variants._sizes", "return None", BEYOND),
    Mutation("tracing/variants.py:Variants._decisions", "return None", BEYOND),
    Mutation("tracing/variants.py:Variants._training", "return None", f"tests/tracing/test_trace_runs.py {BEYOND}"),
    Mutation("tracing/variants.py:_swaps", "yield from ()", f"tests/tracing/test_trace_runs.py {BEYOND}"),
    Mutation("tracing/variants.py:_follows", "return found", f"tests/tracing/test_trace_runs.py {BEYOND}"),
    Mutation("tracing/variants.py:never_seen", "yield from ()", "tests/tracing/test_trace_runs.py"),
    Mutation("tracing/examples.py:with_numbers", "return example", f"tests/tracing/test_trace_runs.py {BEYOND}"),
    Mutation("tracing/examples.py:with_rest", "return example", BEYOND),
    Mutation("tracing/examples.py:with_mask", "return example", f"tests/tracing/test_trace_runs.py {BEYOND}"),
    Mutation("tracing/unreached.py:protect", "return None", BEYOND),
    Mutation("tracing/unreached.py:_whichever", "return None", BEYOND),
    Mutation("tracing/unreached.py:_through_parts", "yield from ()", BEYOND),
    Mutation("tracing/unreached.py:_met_later", "return []", BEYOND),
    Mutation("tracing/followers.py:_copies", "yield from ()", BEYOND),
    Mutation("tracing/followers.py:_follows", "return False", "tests/tracing/test_trace_followers.py"),
    Mutation("tracing/settings.py:_otherwise", "yield from ()", BEYOND),
    Mutation("tracing/variants.py:Variants._more", "return None", "tests/tracing/test_trace_told.py"),
    Mutation("tracing/equations.py:_divisors", "yield from ()", BEYOND),
    Mutation("ops/pool.py:max_unpool", "return call.opaque(x, places)", BEYOND),
    Mutation("ops/pointwise.py:fake_quantized", "return call.opaque(x)", BEYOND),
    Mutation("tracing/questions.py:_after", "return {}", BEYOND),
    Mutation("tracing/questions.py:_Reader._names", "return {}", BEYOND),
    Mutation("tracing/questions.py:_Reader._called", "return None", BEYOND),
    Mutation("tracing/questions.py:_Reader._by_name", "return [], []", BEYOND),
    Mutation("tracing/settings.py:_together", "yield from ()", BEYOND),
    Mutation("tracing/purity.py:Purity._layers_in_turn", "return set()", BEYOND),
    Mutation("tracing/stated.py:coded", "return {}", BEYOND),
    Mutation("tracing/settings.py:_untrue", "return []", BEYOND),
    Mutation("tracing/settings.py:_with", "return []", BEYOND),
    Mutation("tracing/settings.py:_constant", "return None", BEYOND),
    Mutation("tracing/settings.py:_keys", "return {}", f"{BEYOND}/test_beyond.py tests/tracing/test_trace_told.py"),
    Mutation("tracing/settings.py:_written", "yield from ()", BEYOND),
    Mutation("tracing/settings.py:_ways", "return [None] if needs == given else []", BEYOND),
    Mutation("tracing/untaken.py:untaken", "yield from ()", "tests/tracing/test_trace_told.py"),
    Mutation("tracing/recorders.py:FunctionRecorder._note_frames", "return None", "tests/tracing/test_trace_told.py"),
    Mutation("tracing/standins.py:stand_ins", "return {}", f"{BEYOND}/test_beyond.py tests/tracing/test_trace_told.py"),
    Mutation("tracing/variants.py:Variants._branches", "return None", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/forced.py:_decided", "return None", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/forced.py:_compiled", "return function.__code__", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/forced.py:_put", "return None", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/forced.py:_within_itself", "return False", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/forced.py:Forced.fits", "return True", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/ways.py:_inside", "yield from ()", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/ways.py:_one_of_several", "yield from ()", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/shaping.py:picking", "return lambda block: False", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/shaping.py:touches", "return False", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/untaken.py:within", "return [one]", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/capture.py:_Recorded._branching", "return []", "tests/tracing/test_trace_told.py"),
    Mutation("tracing/stated.py:named", "return function.__globals__.get(name)", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/stated.py:_private", "return name", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/purity.py:computes_in", "return True", "tests/tracing/test_trace_forced.py"),
    Mutation("tracing/callers.py:further", "yield from ()", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/callers.py:with_other_dims", "yield from ()", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/settings.py:_in_its_place", "yield from ()", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/questions.py:_tabled", "return {}", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/stated.py:_parts", "yield from ()", f"{BEYOND}/test_beyond.py"),
    Mutation("tracing/capture.py:_of_weights", "return False", BEYOND),
    Mutation("tracing/rehearsal.py:_admissible", "return {}", "tests/tracing/test_trace_told.py"),
    Mutation("sizes/explain.py:Explainer.unknown", 'return ""', "tests/tracing/test_trace_told.py"),
    Mutation("ops/convolution.py:Geometry.still", "return False", BEYOND),
    Mutation("ops/reduce.py:_enough", "return None", "tests/tracing/test_trace_told.py"),
    Mutation("tracing/environment.py:asks_for_gradients", "return False", "tests/tracing/test_trace_followers.py"),
    Mutation("tracing/graph.py:_keep_tables", "return None", f"tests/tracing/test_trace_tables.py {BEYOND}"),
    Mutation("tracing/graph.py:_keep_given", "return None", f"tests/tracing/test_trace_tables.py {BEYOND}"),
    Mutation("tracing/graph.py:_keep_computed", "return None", BEYOND),
    Mutation("tracing/stated.py:_made_with", "yield from ()", BEYOND),
    Mutation("tracing/equations.py:_follows", "return False", BEYOND),
    Mutation("pipeline/rebuild.py:held_here", "return plan", BEYOND),
    # sizes as numbers
    Mutation("tracing/__init__.py:_rehearse", "return None", f"{BEYOND} {STYLES}"),
    Mutation("tracing/environment.py:uncached", "return []", f"tests/state/test_leftovers.py {BEYOND} {STYLES}"),
    Mutation(
        "tracing/recorders.py:FunctionRecorder._count_as_value",
        "return None",
        f"tests/tracing/test_trace_sizes.py {BEYOND}",
    ),
    Mutation(
        "tracing/recorders.py:FunctionRecorder._loose_sizes",
        "return iter(())",
        f"tests/tracing/test_trace_sizes.py {BEYOND}",
    ),
    Mutation("sizes/explain.py:Explainer.loose", "return None", "tests/tracing/test_trace_sizes.py"),
    Mutation("ops/arguments.py:with_numbers", "return args, kwargs", BEYOND),
    Mutation("sizes/explain.py:Explainer.compare", "return None", "tests/tracing/test_trace_views.py"),
    Mutation(
        "sizes/explain.py:Explainer.equal_counts", "return None", "tests/tracing tests/contract/test_commutation.py"
    ),
    Mutation("sizes/explain.py:Explainer.multiple", "return None", "tests/verify/test_verify_experts.py"),
    Mutation("tracing/equations.py:Equations._tighten", "return constraints", "tests/tracing/test_trace_sizes.py"),
    Mutation("tracing/equations.py:Equations._open", "return []", "tests/tracing/test_trace_sizes.py tests/tracing"),
    Mutation("planning/counts.py:_search", "return dict(wanted)", "tests/planning"),
    # what others hold
    Mutation("state/own.py:own_what_is_written", "return None", f"tests/surgery/test_surgery_shared.py {BEYOND}"),
    Mutation("state/leftovers.py:let_go", "return None", "tests/state/test_leftovers.py"),
    Mutation("state/leftovers.py:_of_hooks", "yield from ()", "tests/state/test_leftovers.py"),
    Mutation("state/opaque.py:duplicate", "return value", "tests/tracing/test_trace_unchanged.py"),
    Mutation("state/leftovers.py:_put_attributes", "return None", "tests/state/test_leftovers.py"),
    Mutation("state/pointers.py:Redirection._function", "return value", "tests/state"),
    Mutation("surgery/holders.py:check_alone", "return None", "tests/surgery"),
    Mutation("surgery/holders.py:_check_state", "return None", "tests/surgery/test_surgery_identity.py"),
    Mutation("surgery/holders.py:_Relaid.__call__", "return None", "tests/distributed/test_learning.py"),
    Mutation("surgery/optimizer.py:_cut", "return value", "tests/surgery/test_surgery_optimizer.py"),
    Mutation("surgery/refresh.py:_recompute", "return None", "tests/surgery"),
    Mutation("surgery/refresh.py:_reading", "yield", "tests/surgery/test_surgery_tensors.py"),
    Mutation("tracing/widths.py:told_widths", "yield from ()", "tests/surgery/test_surgery_attributes.py"),
    Mutation("planning/configs.py:config_fields", "yield from ()", "tests/surgery/test_surgery_configs.py"),
    Mutation("surgery/cut.py:_left_of_gradient", "return None", "tests/surgery"),
    Mutation("tracing/source.py:Source.difference", "return None", "tests/planning/test_plan_changed.py tests/tracing"),
    # the way back
    Mutation("state/transaction.py:_put_class", "return None", "tests/state/test_transaction.py"),
    Mutation("state/transaction.py:_put_members", "return None", "tests/state/test_transaction.py"),
    Mutation("state/transaction.py:_put_tensor", "return None", "tests/state/test_transaction.py"),
    Mutation("state/transaction.py:_put_value", "return None", "tests/state/test_transaction.py"),
    Mutation(
        "state/transaction.py:Transaction.roll_back", "return None", "tests/surgery/test_surgery_all_or_nothing.py"
    ),
    # the proof
    Mutation("verify/oracle.py:_magnitudes", "yield size >= 0", "tests/verify"),
    Mutation("verify/oracle.py:distance", "return 0.0", "tests/verify"),
    Mutation("verify/oracle.py:_say_what_was_not_compared", "return None", "tests/verify tests/surgery"),
    Mutation("verify/copies.py:copies_alike", "return True", f"tests/verify tests/surgery {BEYOND}"),
    Mutation("verify/numbers.py:way_of", "return []", f"tests/verify {BEYOND}"),
    Mutation("verify/run.py:drawn", "return None", "tests/verify/test_verify_chance.py"),
    # blocks and experts that go
    Mutation("planning/depth.py:changed_numbers", "yield from ()", "tests/pipeline/test_depth.py"),
    Mutation("planning/depth.py:_lists_in", "return {}", "tests/pipeline/test_depth.py"),
    # blocks that are fitted as a whole, and ranks that are gone
    Mutation("compensate/joint.py:_repeats", "return True", "tests/compensate/test_joint.py"),
    Mutation("compensate/joint.py:_descended", "return dict(own)", "tests/compensate/test_joint.py"),
    Mutation("compensate/joint.py:_Noted.of", "self._wanted = name; yield", "tests/compensate/test_joint.py"),
    Mutation(
        "compensate/moments.py:fitted", "return folds.fit.solve(start, ridge, shift)", "tests/compensate/test_stream.py"
    ),
    # several processes, and files larger than memory
    Mutation("distributed/meeting.py:_Watch._gone", "return False", "tests/distributed/test_replicas.py"),
    Mutation("distributed/meeting.py:agreed", "return None", "tests/distributed/test_replicas.py"),
    Mutation("distributed/meeting.py:of_first", "return make()", "tests/distributed/test_replicas.py"),
    Mutation("distributed/sums.py:totals", "return list(tensors)", "tests/distributed/test_replicas.py"),
    Mutation("distributed/meeting.py:_stop_beating", "return None", "tests/distributed/test_lines.py"),
    Mutation("surgery/holders.py:wrappers_follow", "yield", "tests/distributed/test_replicas.py"),
    Mutation(
        "pipeline/sharded.py:_moved",
        "return like * 0",
        "tests/distributed/test_sharding.py",
    ),
    Mutation("io/loading.py:_under_masks", "return plan", "tests/io/test_state.py"),
    Mutation("io/atomic.py:new_folder", "path.mkdir(); yield path", "tests/io/test_cut_checkpoint.py"),
    Mutation("io/pieces.py:check_whole", "return None", "tests/io/test_cut_checkpoint.py"),
    # what a constructor builds
    Mutation("planning/loadable.py:_check_shapes", "return None", "tests/planning/test_plan_loadable.py"),
    Mutation("planning/loadable.py:_check_tables", "return None", "tests/planning/test_plan_loadable.py"),
    Mutation("planning/loadable.py:_check_same", "return None", "tests/planning/test_plan_loadable.py"),
    Mutation("planning/loadable.py:Loadable.problem", "return None", "tests/planning/test_plan_loadable.py"),
    Mutation("tracing/constructor.py:_whole", "return None", "tests/planning/test_plan_loadable.py"),
    # training
    Mutation("training/lessons.py:Lessons.move_statistics", "return None", "tests/training/test_training_recover.py"),
    Mutation("training/rounds.py:Search._better", "return False", "tests/training/test_training_recover.py"),
    Mutation("training/rounds.py:Search._statistics", "return None", "tests/training/test_training_recover.py"),
    Mutation(
        "training/rounds.py:clearly_lower",
        "return sum(after) < sum(before)",
        "tests/training/test_training_recover.py",
    ),
    Mutation("training/lessons.py:Lessons.by_rows", "return True", "tests/training/test_training_recover.py"),
    Mutation(
        "training/holdout.py:TrainingData._to_learn_from", "return batch", "tests/training/test_training_recover.py"
    ),
    Mutation("training/optimizers.py:check_gradients", "return None", "tests/training/test_training_pruning.py"),
    Mutation("training/penalties.py:HalfSpace.half_space", "return None", "tests/training/test_training_penalty.py"),
    Mutation(
        "training/penalties.py:GReg.__call__",
        "return 0 * view.squares.sum()",
        "tests/training/test_training_penalty.py",
    ),
    Mutation(
        "training/penalties.py:Polarization.__call__",
        "return view.squares.sum()",
        "tests/training/test_training_penalty.py",
    ),
    Mutation("training/penalty.py:Penalty._control", "return None", "tests/training/test_training_penalty.py"),
    Mutation("planning/zeros.py:_is_read", "return True", "tests/training/test_training_penalty.py"),
    Mutation(
        "training/sparse_training.py:_Masked.dense_gradient",
        "return self.gradient",
        "tests/training/test_training_sparse.py",
    ),
    Mutation("training/sparse_training.py:_over_processes", "return value", "tests/training/test_training_sparse.py"),
    Mutation(
        "training/dynamic/rigl.py:RigL.wish",
        "return super().wish(layer, chance)",
        "tests/training/test_training_sparse.py",
    ),
    Mutation(
        "training/dynamic/regrowth.py:SET.wish",
        "return layer.weight.abs() * 0 + 1",
        "tests/training/test_training_sparse.py",
    ),
    Mutation(
        "training/dynamic/gradual.py:cubic_part",
        "return min(1.0, (step - begin) / (end - begin))",
        "tests/training/test_training_sparse.py",
    ),
    Mutation(
        "training/dynamic/movement.py:Movement.change",
        "return super().change(layers, step, chance)",
        "tests/training/test_training_sparse.py",
    ),
    Mutation("training/during.py:check_averages", "return None", "tests/training/test_training_pruning.py"),
    Mutation("training/lessons.py:Lessons._set_modes", "self.model.train()", "tests/training/test_training_recover.py"),
]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def mutate(path: Path, name: str, instead: str) -> None:
    """Put one line in the place of a function's body."""
    text = path.read_text(encoding="utf-8")
    node = dict(functions(ast.parse(text))).get(name)
    if node is None or node.end_lineno is None:
        raise SystemExit(f"{path} has no {name}")
    lines = text.splitlines(keepends=True)
    first = node.body[0]
    lines[first.lineno - 1 : node.end_lineno] = [" " * first.col_offset + instead + "\n"]
    path.write_text("".join(lines), encoding="utf-8")


def noticed(mutation: Mutation) -> str | None:
    """The first test that fails on the mutated source."""
    file, _, name = mutation.function.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        mutate(source / "secateur" / file, name, mutation.instead)
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests.split()]
        done = subprocess.run(run, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    failed = (line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, None) or (f"exit code {done.returncode}" if done.returncode else None)


def main(words: list[str]) -> int:
    """Try the mutations, print what became of each."""
    survivors = 0
    for mutation in MUTATIONS:
        if words and not any(word in mutation.function for word in words):
            continue
        start = time.monotonic()
        by = noticed(mutation)
        survivors += by is None
        print(f"{by or 'SURVIVES':<100.100}  {mutation.function}  {time.monotonic() - start:.0f} s", flush=True)
    print(f"{survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
