"""Jars of Spark's connectors: by their content, from the cache or from a repository, for each version of Spark."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest

from coordinator.model.errors import InvalidRequestError, SetupError
from spark_jobs.session import connectors
from spark_jobs.session.connectors import Jar, connector_jars, fetch_jars, with_connectors
from spark_jobs.session.spark_session import start_session

CONTENT = b"classes"
JAR = Jar("org.example", "tool_2.12", "1.0", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "statefleet" / "jars"


def repository_of(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have the repository send the same content for every jar; return the list of what was asked for, which grows."""
    requests: list[list[str]] = []

    def download(jars: Collection[Jar], folder: Path, ivy_settings: str | None) -> None:
        requests.append([jar.coordinate for jar in jars])
        for jar in jars:
            (folder / jar.file_name).write_bytes(content)

    monkeypatch.setattr(connectors, "_download", download)
    return requests


def test_a_jar_is_downloaded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = repository_of(CONTENT, monkeypatch)
    assert fetch_jars([JAR]) == fetch_jars([JAR]) == [cache / "tool_2.12-1.0.jar"]
    assert requests == [["org.example:tool_2.12:1.0"]]
    assert [file.name for file in cache.iterdir()] == ["tool_2.12-1.0.jar"]


def test_a_damaged_jar_in_the_cache_is_downloaded_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository_of(CONTENT, monkeypatch)
    cache.mkdir(parents=True)
    (cache / JAR.file_name).write_bytes(CONTENT[:3])
    (file,) = fetch_jars([JAR])
    assert file.read_bytes() == CONTENT


def test_a_jar_of_another_content_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository_of(b"other classes", monkeypatch)
    with pytest.raises(SetupError, match=r"SHA-256 differs; it was not used \[jar=`org.example:tool_2.12:1.0`"):
        fetch_jars([JAR])
    assert not list(cache.iterdir())


def test_a_repository_that_does_not_answer_is_named_with_its_jars(tmp_path: Path) -> None:
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="empty"/><resolvers><filesystem name="empty">'
        f'<artifact pattern="{tmp_path}/none/[artifact].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    with pytest.raises(SetupError, match=r"could not be downloaded.*jars=`org.example:tool_2.12:1.0`"):
        fetch_jars([JAR], ivy_settings=str(settings))


def test_an_unknown_connector_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="there are avro, delta, iceberg, kafka"):
        connector_jars(["kafak"])


@pytest.mark.parametrize(("connector", "spark"), [("kafka", "3.1"), ("iceberg", "4.2")])
def test_a_version_of_spark_without_a_jar_is_refused(connector: str, spark: str) -> None:
    with pytest.raises(
        SetupError,
        match=f"there is no jar of this connector for this version of Spark; .*connector=`{connector}` spark=`{spark}`",
    ):
        connector_jars([connector], spark)


def test_names_are_a_list() -> None:
    with pytest.raises(InvalidRequestError, match="connectors are a list of names"):
        start_session("jobs", connectors="kafka")


def test_under_raydp_submit_the_command_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(
        SetupError, match=r"--packages.*spark-sql-kafka-0-10_2\.1\d:.*,org\.apache\.kafka:kafka-clients:"
    ):
        start_session("jobs", connectors=["kafka"])


def test_lists_of_settings_are_joined_and_the_users_come_first() -> None:
    user = {
        "spark.jars": "/a.jar",
        "spark.sql.extensions": "org.example.Mine",
        "spark.sql.catalog.spark_catalog": "mine",
    }
    added = {
        "spark.jars": "/b.jar,/a.jar",
        "spark.sql.extensions": "org.example.Delta",
        "spark.sql.catalog.spark_catalog": "x",
    }
    assert with_connectors(user, added) == {
        "spark.jars": "/a.jar,/b.jar",
        "spark.sql.extensions": "org.example.Mine,org.example.Delta",
        "spark.sql.catalog.spark_catalog": "mine",
    }


def test_a_jar_beside_the_main_one_of_its_version_has_a_name_of_its_own() -> None:
    jars = [Jar.parse(f"org.example:tool:1.0{classifier} {JAR.sha256}") for classifier in ("", ":tests")]
    assert [jar.file_name for jar in jars] == ["tool-1.0.jar", "tool-1.0-tests.jar"]
    assert {jar.coordinate for jar in jars} == {"org.example:tool:1.0"}


def test_every_listed_jar_has_a_coordinate_and_a_sha256() -> None:
    file = Path(connectors.__file__).with_name("connectors.toml")
    for connector in tomllib.loads(file.read_text()).values():
        for lines in connector["jars"].values():
            for jar in map(Jar.parse, lines):
                assert len(bytes.fromhex(jar.sha256)) == 32
                assert all((jar.group, jar.artifact, jar.version))
