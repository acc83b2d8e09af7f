"""Every code block of README and ``docs/`` has a test: Python that runs, commands that exist, data that is read."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from typer._click.exceptions import UsageError as TyperUsageError

from statefleet.cli import app
from tests.code_blocks import ROOT, Block, blocks_of, every_block, runner

BLOCKS = list(every_block())
#: Commands of ``./run`` itself; any other word after it begins a command line.
RUN_COMMANDS = set(re.findall(r"^    (\w+)\)", (ROOT / "run").read_text(), re.MULTILINE))
_ASSIGNMENT = re.compile(r"\w+=.*")


def test_every_block_is_of_a_class() -> None:
    """A block without a language is printed output, or a drawing of characters."""
    classes = {"python", "bash", "json", "yaml", "sql", ""}
    assert not [str(block) for block in BLOCKS if block.language not in classes]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_every_python_block_is_run_by_a_test(block: Block) -> None:
    test = runner(block)
    assert test is not None, "no test runs this page; see tests/code_blocks.py"
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    # The named test asks for its blocks, and fails if there are none.
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    assert test in {ast.literal_eval(call.args[0]) for call in calls if isinstance(call.args[0], ast.Constant)}


@pytest.mark.parametrize("block", of("json", "yaml"), ids=str)
def test_data_can_be_read(block: Block) -> None:
    assert (json.loads if block.language == "json" else yaml.safe_load)(block.code)


def test_notebooks_show_what_they_print() -> None:
    notebooks = [json.loads(file.read_text()) for file in (ROOT / "examples").glob("*.ipynb")]
    assert notebooks
    for notebook in notebooks:
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        # The notebook was run once from top to bottom, in a new kernel.
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        for cell in cells:
            kinds = [output["output_type"] for output in cell["outputs"]]
            tree = ast.parse("".join(cell["source"]))
            calls = [
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            ]
            assert ("stream" in kinds) == ("print" in calls), cell["id"]
            assert {*kinds} <= {"stream", "execute_result"}
            assert all(output.get("name", "stdout") == "stdout" for output in cell["outputs"])
            assert not re.search(r"(?<![\w.<])/\w+/", json.dumps(cell["outputs"])), "a path of a machine"
        assert any("execute_result" in json.dumps(cell["outputs"]) for cell in cells)


# -- commands -----------------------------------------------------------------------------------------------------


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block."""
    for line in code.replace("\\\n", " ").splitlines():
        # Pipes and redirections end a command, as in a shell.
        words = shlex.split(line, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]) and "://" not in words[0]:
            words = words[1:]
        cut = next((index for index, word in enumerate(words) if word in (">", ">>", "|", "&&", "&")), len(words))
        if words:
            yield words[:cut]


def check(words: list[str]) -> None:
    """Fail if there is no such command, or it has no such option."""
    program, *arguments = words
    if program == "./run":
        if arguments and arguments[0] not in RUN_COMMANDS and not arguments[0].startswith("-"):
            check(arguments)
    elif program == "python" or program.endswith("/python"):
        check_module(arguments)
    elif program == "statefleet":
        parse(typer.main.get_command(app), arguments)
    elif program == "ray":
        from ray.scripts.scripts import cli

        parse(cli, arguments)
    elif program == "bash":
        assert arguments[0] == "-c"
        check_submit(arguments[1])
    elif program == "prometheus":
        (option,) = arguments
        assert (ROOT / option.removeprefix("--config.file=")).is_file()
    elif program == "kubectl":
        check_kubectl(arguments)
    elif program in ("helm", "podman"):
        assert arguments[0] in ("build", "install", "push", "repo", "run")
    elif program == "pytest":
        missing = [
            argument
            for argument in arguments
            if argument.startswith("tests/") and not (ROOT / argument.partition("::")[0]).exists()
        ]
        assert not missing
    else:
        assert program in ("cd", "curl", "echo", "export", "mkdir", "pip", "psql", "ssh"), f"what is {program}?"


def parse(command: Any, words: list[str]) -> None:
    """Have the program's own parser read the words of a block; typer's commands have the same methods as click's."""
    context = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name, [words[0]], parent=context, resilient_parsing=True)
        _, command, words = command.resolve_command(context, words)
        assert command is not None
    command.make_context(command.name, words, parent=context)


def check_module(words: list[str]) -> None:
    """Check that a program of this repository exists, and that its package's text has its options."""
    assert words[0] == "-m", words
    if words[1].partition(".")[0] not in ("benchmarks", "docs_site", "spark_jobs", "tests"):
        assert words[1] in ("pip", "venv")
        return
    spec = importlib.util.find_spec(words[1])
    assert spec is not None, words[1]
    text = "".join(file.read_text() for file in (ROOT / words[1].partition(".")[0]).rglob("*.py"))
    assert not [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in text], words


def check_kubectl(words: list[str]) -> None:
    """Check the files that kubectl is given and the command that it runs in a pod; kubectl itself may not be here."""
    assert words[0] in ("apply", "create", "delete", "drain", "exec", "get", "logs", "port-forward"), words
    files = [file for option, file in itertools.pairwise(words) if option == "-f"]
    assert files or words[0] != "apply"
    assert not [file for file in files if not (ROOT / file).is_file()]
    if "--" in words:
        check(words[words.index("--") + 1 :])


def check_submit(line: str) -> None:
    """Check RayDP's own command, which is found by its folder."""
    spec = importlib.util.find_spec("raydp")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    script = re.fullmatch(r'\$\(python -c "import raydp; [^"]*"\)/(bin/[\w-]+) .*', line, re.DOTALL)
    assert script is not None, line
    assert (folder / script[1]).exists()


@pytest.mark.parametrize("block", of("bash"), ids=str)
def test_every_command_is_there(block: Block) -> None:
    of_block = list(commands(block.code))
    assert of_block
    for words in of_block:
        check(words)


def test_commands_in_sentences_are_there() -> None:
    """Only commands that name a fleet: these are complete."""
    files = {ROOT / block.page for block in BLOCKS}
    spans = [span for file in files for span in re.findall(r"`(statefleet \w+ \w+://[^`]*)`", file.read_text())]
    assert spans
    for span in spans:
        check(shlex.split(span))


@pytest.mark.parametrize(
    "line",
    [
        "statefleet stats s3://bucket/prefix",
        "statefleet scan s3://bucket/prefix clicks --were x",
        "statefleet status",
        "./run everything",
        "./run python -m spark_jobs.no_such_job",
        "python -m benchmarks.realtime --no-such-option 3",
        "ray job submit --no-such-option x",
        "frobnicate now",
        "kubectl apply -f deploy/kubernetes/none.yaml",
        "kubectl exec service/head -- statefleet stats s3://bucket/prefix",
    ],
)
def test_the_check_knows_a_wrong_command(line: str) -> None:
    (words,) = commands(line)
    with pytest.raises((AssertionError, click.UsageError, TyperUsageError)):
        check(words)


# -- Python that needs no Spark -----------------------------------------------------------------------------------


def test_a_warning_is_silenced_as_the_page_says() -> None:
    import statefleet

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for block in blocks_of("tests/unit/test_docs_blocks.py::test_a_warning_is_silenced_as_the_page_says"):
            exec(compile(block.code, str(block), "exec"), {"warnings": warnings, "statefleet": statefleet})
        warnings.warn("it grows", statefleet.UnboundedStateWarning, stacklevel=1)
        assert not caught
