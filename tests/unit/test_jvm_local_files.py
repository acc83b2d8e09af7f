"""Files of this machine as Spark's driver writes them: with the permissions that Hadoop gives them, and without a process for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from tests.unit.jvm import Jvm

_HADOOP = "org.apache.hadoop.fs"


@pytest.fixture
def files(jvm: Jvm) -> Any:
    """Hadoop's files, as a session of Spark opens them."""
    conf = jvm.named("org.apache.hadoop.conf.Configuration")()
    conf.set("fs.file.impl", "org.apache.spark.sql.statefleet.LocalFiles")
    return jvm.named(f"{_HADOOP}.FileSystem").newInstance(jvm.named("java.net.URI").create("file:///"), conf)


@pytest.mark.parametrize("mode", ["000", "001", "400", "644", "755", "777", "1777"])
def test_a_file_and_its_checksums_have_the_permissions_that_they_are_given(
    jvm: Jvm, files: Any, tmp_path: Path, mode: str
) -> None:
    path = jvm.named(f"{_HADOOP}.Path")(str(tmp_path / "file"))
    files.create(path).close()
    files.setPermission(path, jvm.named(f"{_HADOOP}.permission.FsPermission")(mode))
    modes = {file.name: file.stat().st_mode & 0o7777 for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("file", ".file.crc"), int(mode, 8))


def test_a_new_file_has_those_of_hadoops_mask(jvm: Jvm, files: Any, tmp_path: Path) -> None:
    files.create(jvm.named(f"{_HADOOP}.Path")(str(tmp_path / "file"))).close()
    assert (tmp_path / "file").stat().st_mode & 0o7777 == 0o644


def test_a_file_that_is_not_there_gets_none(jvm: Jvm, files: Any, tmp_path: Path) -> None:
    path = jvm.named(f"{_HADOOP}.Path")(str(tmp_path / "none"))
    with pytest.raises(Py4JJavaError, match="none"):
        files.setPermission(path, jvm.named(f"{_HADOOP}.permission.FsPermission")("644"))
