"""Compiled kernels on disk always belong to the sources beside them, whichever file was changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from store_actors.engine.compiled_code import KERNELS, drop_stale, is_compiled, warm

INNER = """
from numba import int64, njit

@njit(int64(int64), cache=True)
def inner(value):
    return value + {}
"""
OUTER = """
from numba import int64, njit
from inner_kernels import inner

@njit(int64(int64), cache=True)
def outer(value):
    return inner(value)
"""


def test_the_kernels_of_the_store_actors_are_where_they_are_looked_for_and_need_nothing_that_is_installed_later() -> (
    None
):
    """Set-up compiles them beside the download of the other packages."""
    kernels = [source.stem for source in KERNELS.glob("*kernels.py")]
    assert "row_kernels" in kernels
    program = f"import {', '.join(f'store_actors.engine.{name}' for name in kernels)}, sys; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=KERNELS.parents[1]
    )
    assert not {"pyarrow", "msgspec", "ray", "psutil", "obstore"} & {
        name.partition(".")[0] for name in ran.stdout.split()
    }


def answer(folder: Path) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", "from outer_kernels import outer; print(outer(0))"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    return int(ran.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner_kernels.py").write_text(INNER.format(1))
    (tmp_path / "outer_kernels.py").write_text(OUTER)
    drop_stale(str(tmp_path))
    assert answer(tmp_path) == 1
    return tmp_path


def test_a_changed_file_is_used_by_the_kernels_of_the_others(folder: Path) -> None:
    (folder / "inner_kernels.py").write_text(INNER.format(20))
    # Numba alone does not see the change. If it ever does, the rest of this is not needed any more.
    assert answer(folder) == 1
    drop_stale(str(folder))
    assert answer(folder) == 20


def test_unchanged_kernels_are_compiled_once(folder: Path) -> None:
    def compiled() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in (folder / "__pycache__").glob("*.nb?")}

    before = compiled()
    assert before
    drop_stale(str(folder))
    assert answer(folder) == 1
    assert compiled() == before


def test_a_folder_that_cannot_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "inner_kernels.py").write_text(INNER.format(1))
    # A file cannot become a folder, not even for root.
    (tmp_path / "__pycache__").write_text("")
    drop_stale(str(tmp_path))
    assert (tmp_path / "__pycache__").read_text() == ""


def test_a_folder_is_compiled_once_all_of_it_was_and_no_more_when_a_source_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_compiled(folder), "one process has used some of it"
    package = folder.parent / "warmed"
    folder.rename(package)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.syspath_prepend(str(package))
    assert list(warm(package, "warmed")) == [(0, 2), (1, 2), (2, 2)]
    assert is_compiled(package)
    (package / "inner_kernels.py").write_text(INNER.format(2))
    assert not is_compiled(package)
