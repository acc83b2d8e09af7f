"""Whether a query fits an existing state, and how its aggregates continue those that are there.

Fixed for the life of a state: the operator, the output mode, the keys (without any, the number of shards, too) and the key that groups
expire by. The aggregates may change from one run of the query to the next: new ones start from nothing, those that are gone are left
out, the order does not matter, and a state field may take a wider type. They are matched by their meaning, not by their place. Schemas
are in JSON form here (``coordinator.model.schema.StateSchema.to_json``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.model.errors import StateMismatchError
from coordinator.model.state_metadata import StateMetadata

__all__ = [
    "changes",
    "check_metadata",
    "check_output_mode",
    "continued",
    "fitting",
    "is_wider",
    "routing_keys",
    "same_description",
    "same_state",
    "unroutable",
]

#: Types that hold every value of another one.
_WIDER = {
    "int8": ("int16", "int32", "int64", "float32", "float64"),
    "int16": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "float32": ("float64",),
}
#: Options that say how event time moves, not what state is.
_OF_EVENT_TIME = {"sources", "upstream", "upstream_sources", "policy", "late_us", "late"}
#: Kinds whose states are the same thing: which rows are counted depends on whether a column can be null.
_COUNTS = {"count_rows", "count_valid"}
#: Kinds of operators (``coordinator.model.schema.OperatorKind``) as a user calls them.
_OPERATORS = {
    "aggregate": "an aggregation",
    "session": "an aggregation by session windows",
    "deduplicate": "dropDuplicates",
    "join": "a join of two streams",
    "top": "topN",
    "limit": "limit",
    "group_state": "applyInPandasWithState or applyInArrowWithState",
    "transform": "transformWithState",
    "partitions": "a function with a state store",
}


def check_metadata(existing: StateMetadata, asked: StateMetadata) -> None:
    """Refuse a query that does not fit the state.

    Raises
    ------
    StateMismatchError
        Operator, output mode, schema or number of shards differ; names the first of these that does, and shows both.
    """
    facts = {"state": existing.state_name}
    # First, as all the rest follows from it.
    if _operator(existing) != _operator(asked):
        raise StateMismatchError(
            f"the state was made by {_operator(existing)}, and the query asks for {_operator(asked)}, which could not read its rows; "
            "nothing was changed; restore the query, or use another name for the new one",
            existing=_operator(existing),
            asked=_operator(asked),
            **facts,
        )
    check_output_mode(existing, asked.output_mode)
    for part, brief in (("keys", _brief), ("expiry_key", str), ("options", str)):
        if _fixed_part(existing, part) != _fixed_part(asked, part):
            raise _mismatch(f"the query's {part} differ from those of the existing state", part, existing, asked, brief)
    # After the keys: a query without any has one shard, and is another query. Where rows are partitioned by their keys, any number will
    # do: the state is rescaled.
    if existing.num_shards != asked.num_shards and not routing_keys(existing):
        raise StateMismatchError(
            unroutable(existing),
            existing=existing.num_shards,
            asked=asked.num_shards,
            **facts,
        )
    try:
        continued(_accumulators(existing.schema), _accumulators(asked.schema))
    except ValueError as error:
        raise _mismatch(
            f"the query's accumulators differ from those of the existing state: {error}",
            "accumulators",
            existing,
            asked,
            _brief,
        ) from error


def check_output_mode(existing: StateMetadata, asked: str) -> None:
    """Refuse another output mode than a state's.

    Raises
    ------
    StateMismatchError
        It differs.
    """
    if existing.output_mode != asked:
        raise StateMismatchError(
            "the state was made in another output mode; use that, or another name",
            existing=existing.output_mode,
            asked=asked,
            state=existing.state_name,
        )


def routing_keys(metadata: StateMetadata) -> tuple[str, ...]:
    """Columns of a state's rows by whose hash they are partitioned.

    None where the user's own partitions hold what they like, or one shard holds all.
    """
    if metadata.output_mode == "keyed":
        return ()
    names = (field["name"] for field in metadata.schema.get("keys", ()))
    return tuple(name for name in names if not name.startswith("__"))


def unroutable(metadata: StateMetadata) -> str:
    """Why a state without such columns cannot be rescaled, and what to do."""
    if metadata.output_mode == "keyed":
        return (
            "the number of partitions is fixed for the life of a state whose partitions are a function's or a program's own: nobody "
            "else knows which of its rows belong where; nothing was changed; use the existing number, or another name"
        )
    return "an operator without keys has one shard by nature; nothing was changed; leave shards out"


def fitting(
    schemas: Iterable[Mapping[str, Any] | None], created: StateMetadata, asked: StateMetadata
) -> Mapping[str, Any] | None:
    """The schema that a query would go on from, None if from nothing.

    Parameters
    ----------
    schemas
        What each batch that the query may begin at would find, the likelier one first; None is nothing. At least one.
    created
        The state's metadata, whatever its schema.

    Raises
    ------
    StateMismatchError
        It fits none of them; told of the first one.
    """
    refusal: StateMismatchError | None = None
    for schema in schemas:
        try:
            check_metadata(replace(created, schema=asked.schema if schema is None else dict(schema)), asked)
        except StateMismatchError as error:
            refusal = refusal or error
        else:
            return schema
    assert refusal is not None
    raise refusal


def same_state(former: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the rows of two schemas mean the same, column by column (and neither says more about them than the other)."""
    first, second = _accumulators(former), _accumulators(new)
    if not _have_meanings(first) or not _have_meanings(second):
        return [_layout(item) for item in first] == [_layout(item) for item in second]
    return [(_identity(item), _layout(item)) for item in first] == [(_identity(item), _layout(item)) for item in second]


def same_description(former: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a reader is shown the same of two schemas' rows; where the rows mean the same, it is no other state if not."""
    return bool(former.get("shown", {}) == new.get("shown", {}))


def continued(former: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """For each of the new accumulators the place of the former one that it continues; None if it starts from nothing.

    Raises
    ------
    ValueError
        They do not go together; says why.
    """
    if not _have_meanings(former) or not _have_meanings(new):
        if [_layout(item) for item in former] != [_layout(item) for item in new]:
            raise ValueError(
                "the state does not say what its aggregates mean (an early version made it), so they are fixed"
            )
        return list(range(len(new)))
    places = _matched([_identity(item) for item in former], [_identity(item) for item in new])
    for item, place in zip(new, places, strict=True):
        if place is not None and (obstacle := _obstacle(former[place], item)):
            raise ValueError(f"{item['meaning']} {obstacle}")
    if former and all(place is None for place in places):
        raise ValueError("not one of the aggregates is there, so this is another query")
    return places


def changes(former: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    """Accumulators that a query which fits starts from nothing, and those that it leaves out, as a person reads them."""
    first, second = _accumulators(former), _accumulators(new)
    places = continued(first, second)
    begun = [item for item, place in zip(second, places, strict=True) if place is None]
    return _brief(begun), _brief([item for place, item in enumerate(first) if place not in places])


def is_wider(former: str, new: str) -> bool:
    """Whether a type (named as in a schema) holds every value of another one, exactly; of lists, that of their elements."""
    if former.startswith("list<") and new.startswith("list<"):
        return is_wider(former[5:-1], new[5:-1])
    if former.startswith("decimal(") and new.startswith("decimal("):
        (precision, scale), (wide, same) = (name[8:-1].split(",") for name in (former, new))
        return int(wide) >= int(precision) and same == scale
    return former == new or new in _WIDER.get(former, ())


def _accumulators(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    items: Sequence[Mapping[str, Any]] = schema.get("accumulators", ())
    return items


def _have_meanings(items: Sequence[Mapping[str, Any]]) -> bool:
    return all(item.get("meaning") for item in items)


def _identity(item: Mapping[str, Any]) -> tuple[str, str]:
    return item["meaning"], item["cast"]


def _layout(item: Mapping[str, Any]) -> Any:
    return item["kind"], [_typed(field) for field in item["state"]]


def _matched(former: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[int | None]:
    """Equal meanings under equal casts; then what is left over of the same meaning, if there is one of it on each side."""
    places: dict[tuple[str, str], int | None] = {one: former.index(one) if one in former else None for one in new}
    left = [place for place, one in enumerate(former) if one not in places]
    for meaning, cast in [one for one, place in places.items() if place is None]:
        rivals = [one for one, place in places.items() if one[0] == meaning and one not in former]
        candidates = [place for place in left if former[place][0] == meaning]
        if len(rivals) == len(candidates) == 1:
            places[meaning, cast] = candidates[0]
    return [places[one] for one in new]


def _obstacle(former: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if former["kind"] != new["kind"] and not {former["kind"], new["kind"]} <= _COUNTS:
        return f"cannot go on as {new['kind']} from {former['kind']}"
    for before, after in zip(former["state"], new["state"], strict=True):
        if not is_wider(before["type"], after["type"]):
            return f"cannot become {after['type']}, it is {before['type']}"
    return ""


def _operator(metadata: StateMetadata) -> str:
    """What made a state, in a user's words."""
    if metadata.output_mode == "keyed":
        return "a keyed state store"
    schema = metadata.schema
    kind = schema.get("operator") or "aggregate"  # as states were before there were others
    if kind == "deduplicate" and _accumulators(schema):
        return "dropDuplicatesWithinWatermark"
    if kind == "top" and schema.get("options", {}).get("ties") == "last":
        return "keepLast"
    return _OPERATORS.get(kind, kind)


def _fixed_part(metadata: StateMetadata, part: str) -> Any:
    value = metadata.schema.get(part)
    if part == "options":
        return {name: option for name, option in (value or {}).items() if name not in _OF_EVENT_TIME}
    return [_typed(field) for field in value or ()] if part == "keys" else value


def _mismatch(
    reason: str, part: str, existing: StateMetadata, asked: StateMetadata, brief: Callable[[Any], Any]
) -> StateMismatchError:
    return StateMismatchError(
        f"{reason}, whose rows it could not read; nothing was changed; restore the query, or use another name for the new one",
        existing=brief(existing.schema.get(part)),
        asked=brief(asked.schema.get(part)),
        state=existing.state_name,
    )


def _typed(field: Mapping[str, Any]) -> tuple[Any, Any]:
    return field["name"], field["type"]


def _brief(part: Any) -> str:
    """Fields or accumulators as a person reads them: ``name type``, or what is accumulated and the types of its state."""
    return ", ".join(
        f"{item['name']} {item['type']}" if "type" in item else f"{_named(item)} {' '.join(_types(item))}"
        for item in part or ()
    )


def _named(item: Mapping[str, Any]) -> str:
    if not item.get("meaning"):
        return f"{item['kind']}({', '.join(item['inputs'])})"
    return f"{item['kind']}: {item['meaning']}" + (f" as {item['cast']}" if item["cast"] else "")


def _types(item: Mapping[str, Any]) -> list[str]:
    return [field["type"] for field in item["state"]]
