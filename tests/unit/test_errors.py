"""Errors survive pickling between processes, with their message and context."""

from __future__ import annotations

import pickle

import pytest

from coordinator.model import errors


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_every_error_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("what happened; what to do", shard=3, version=7)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == "what happened; what to do [shard=`3` version=`7`]"
    assert isinstance(copy, errors.StateStoreError)
