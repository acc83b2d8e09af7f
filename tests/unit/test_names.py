"""Names of states and stores become folders: other names are refused before anything is written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from coordinator.model.errors import InvalidRequestError
from coordinator.model.names import check_state_name, check_store_name, is_state_name
from store_actors.client.state_store import store_specs

NO_FOLDERS = ("", ".", "..", "a/b", "../a", "/a", "_probe", ".tmp", "-a", "a b", "a\n", "ä", "a" * 129)


@pytest.mark.parametrize("name", NO_FOLDERS)
def test_a_name_that_is_no_folder_is_refused_for_a_state_and_a_store(name: str) -> None:
    assert not is_state_name(name)
    with pytest.raises(InvalidRequestError, match="a state's name is a folder"):
        check_state_name(name)
    with pytest.raises(InvalidRequestError, match="a store's name is a folder"):
        check_store_name(name)


@pytest.mark.parametrize("name", ["7", "0012", "names.delta", "a.snapshot"])
def test_names_of_partitions_and_files_are_refused_for_stores_only(name: str) -> None:
    check_state_name(name)
    with pytest.raises(InvalidRequestError, match="a store's name is a folder"):
        check_store_name(name)


@pytest.mark.parametrize("name", ["clicks", "Clicks-2.v1_b", "left-keyToNumValues", "2nd", "a" * 128])
def test_ordinary_names_are_accepted(name: str) -> None:
    """Nothing is raised."""
    check_state_name(name)
    check_store_name(name)


def test_the_columns_of_stores_go_by_checked_names() -> None:
    columns = (pa.schema([("k", pa.string())]), pa.schema([("v", pa.int64())]))
    assert [spec.name for spec in store_specs(None, None, {"by.user": columns})] == ["by.user"]
    with pytest.raises(InvalidRequestError, match=r"name=`\.\.`"):
        store_specs(None, None, {"..": columns})
