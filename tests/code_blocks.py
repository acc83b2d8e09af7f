"""The code blocks of README and ``docs/``, and which test runs each of those that are Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_RESULT = re.compile(r"^result = ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes
    ----------
    page
        Path of its file in the repository.
    line
        Where it begins, from 1.
    language
        As it stands behind the fence; empty without one.
    """

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


#: Tests that run the Python blocks of a page, one after the other as they stand.
_PAGE_TESTS = {
    "README.md": "tests/integration/test_pages.py::test_the_front_page",
    "docs/format.md": "tests/unit/test_operator_shards.py::test_the_format_document_reads_a_version_without_this_package",
    "docs/migration.md": "tests/integration/test_pages.py::test_a_program_is_moved",
    "docs/kafka.md": "tests/connectors/test_kafka_pages.py::test_the_programs_of_the_page_run",
    "docs/live-state.md": "tests/integration/test_live_docs.py::test_the_examples_run",
    "docs/quickstart.md": "tests/integration/test_pages.py::test_the_quickstart",
    "docs/real-time.md": "tests/connectors/test_real_time_page.py::"
    "test_the_program_of_the_page_runs_and_its_query_goes_to_micro_batches_and_back",
    "docs/scaling.md": "tests/integration/test_pages.py::test_the_front_page",
    "docs/tables.md": "tests/connectors/test_tables.py::test_the_programs_of_the_page_run",
    "docs/testing.md": "tests/integration/test_query_tester.py::test_the_page",
}
#: The program that follows changes, beside the query of the same page.
_ONCE = (
    "tests/connectors/test_real_time_page.py::test_a_follower_that_dies_between_any_two_steps_sends_each_change_once"
)
#: The program that holds results until their epoch counts.
_HELD = "tests/connectors/test_real_time_page.py::test_what_a_function_emits_is_sent_once_by_a_program_that_holds_it"
#: The programs of these do the same.
_OWN_SESSION = "tests/integration/test_any_session.py::test_a_session_on_threads_counts_beside_ray"
_ON_KUBERNETES = "tests/kubernetes/test_spark_on_kubernetes.py::test_executors_count_each_row_once_without_ray"
_IMPORT = re.compile(r"\bfleet\.import_\w+\(")
_IMPORTS = "tests/integration/test_pages.py::test_state_is_imported"
_OPERATOR_EXAMPLES = "tests/integration/test_docs.py::test_example"
_OTHERS_OF_OPERATORS = "tests/unit/test_docs_blocks.py::test_a_warning_is_silenced_as_the_page_says"


def every_block() -> Iterator[Block]:
    """Yield all blocks of all pages."""
    for file in PAGES:
        for token in MarkdownIt("gfm-like", {"linkify": False}).parse(file.read_text()):
            if token.type in ("fence", "code_block"):
                line = (token.map or [0])[0] + 1
                yield Block(str(file.relative_to(ROOT)), line, token.info.strip(), token.content)


def runner(block: Block) -> str | None:
    """Return the test that runs a Python block, as pytest names it; None if there is none."""
    if ".state_store(" in block.code:
        return _PAGE_TESTS["README.md"]
    if block.page == "docs/operators.md":
        return _OPERATOR_EXAMPLES if _RESULT.search(block.code) else _OTHERS_OF_OPERATORS
    if "transactional.id" in block.code:
        return _HELD if "run_id" in block.code else _ONCE
    if "k8s://https" in block.code:
        return _ON_KUBERNETES
    if "SparkSession.builder.master" in block.code:
        return _OWN_SESSION
    if _IMPORT.search(block.code):
        return _IMPORTS
    return _PAGE_TESTS.get(block.page)


def blocks_of(test: str) -> list[Block]:
    """Return the Python blocks that a test has to run, in the order of their pages."""
    blocks = [block for block in every_block() if block.language == "python" and runner(block) == test]
    assert blocks, f"no block is run by {test}"
    return blocks
