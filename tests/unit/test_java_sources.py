"""The Java files of the exchange as the single compilation unit that Spark's compiler takes."""

from __future__ import annotations

import re
from pathlib import Path

import spark_jobs.plan
from spark_jobs.plan.spark_version import SPARK, with_moved_classes
from spark_jobs.plan.stateful_exchange import joined_source

JAVA = Path(spark_jobs.plan.__file__).parent / "java"
SOURCES = sorted([*JAVA.glob("*.java"), *(JAVA / SPARK.JAVA_FOLDER).glob("*.java")])
_CLASS = re.compile(r"^(?:public )?(?:abstract )?class (\w+)", re.MULTILINE)


def test_the_joined_source_has_one_package_then_all_imports_then_all_classes() -> None:
    lines = joined_source().splitlines()
    imports = [number for number, line in enumerate(lines) if line.startswith("import ")]
    assert [number for number, line in enumerate(lines) if line.startswith("package ")] == [0]
    assert imports == list(range(1, len(imports) + 1))
    assert len({lines[number] for number in imports}) == len(imports)


def test_every_class_of_every_file_is_in_it_once() -> None:
    in_files = [name for file in SOURCES for name in _CLASS.findall(file.read_text())]
    assert len(SOURCES) > 1
    assert sorted(_CLASS.findall(joined_source())) == sorted(in_files)
    assert len(set(in_files)) == len(in_files)


def test_each_file_has_the_class_of_its_name_and_imports_that_mean_one_class() -> None:
    imported: dict[str, str] = {}
    for file in SOURCES:
        assert file.stem in _CLASS.findall(file.read_text())
        for full_name in re.findall(r"^import ([\w.$]+);", with_moved_classes(file.read_text()), re.MULTILINE):
            assert imported.setdefault(full_name.rpartition(".")[2], full_name) == full_name


def test_both_versions_of_spark_have_the_same_classes_of_their_own() -> None:
    folders = [folder for folder in JAVA.iterdir() if folder.is_dir()]
    classes = [
        sorted(name for file in folder.iterdir() for name in _CLASS.findall(file.read_text())) for folder in folders
    ]
    assert len(folders) == 2
    assert classes[0] == classes[1]
