"""Accumulators are defined by one table; code and docs that cannot be derived from it agree with it."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.model.accumulator_kinds import AccumulatorKind
from spark_jobs.operators.accumulators import supported_functions
from store_actors.engine import fold_kernels, row_kernels, sketch_kernels
from store_actors.engine.accumulator_rules import RULES, Ordering, StateForm
from store_actors.engine.op_code_kernels import OpCode

ROOT = Path(__file__).parents[2]


def test_every_kind_has_its_rule() -> None:
    assert RULES.keys() == set(AccumulatorKind)
    for kind, rule in RULES.items():
        is_folded = rule.form is StateForm.FOLDED
        assert (rule.raw is not None) == (rule.merge is not None) == is_folded, kind
        for step in (rule.raw, rule.merge):
            assert step is None or isinstance(step, OpCode) or step.keys() == set(Ordering), kind


def test_compiled_branches_name_every_step_and_no_number() -> None:
    source = "".join(Path(module.__file__).read_text() for module in (fold_kernels, row_kernels, sketch_kernels))
    named = re.findall(r"\bcode == OpCode\.([A-Z_0-9]+)", source)
    # The last step of a function is its `else`, with its name in a comment.
    assert {*named, *re.findall(r"else:  # ([A-Z_]+)\n", source)} == {code.name for code in OpCode}
    assert not re.findall(r"\b(?:code|kind) (?:==|!=|<=|>=|<|>) -?\d", source)


def test_the_operators_page_lists_the_supported_functions() -> None:
    (listed,) = re.findall(r"\nAggregates: ([^.]+)\.", (ROOT / "docs" / "operators.md").read_text())
    assert re.split(r",\s+", listed) == supported_functions()
