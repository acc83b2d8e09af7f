"""Whether a query fits an existing state, and how its aggregates continue those that are there. Pure.

Fixed for the life of a state: the operator, the output mode, the keys (without any, the number of shards, too) and the key that groups
expire by. The aggregates may change from one run of the query to the next: new ones start from nothing, those that are gone are left
out, the order does not matter, and a state field may take a wider type. They are matched by their meaning, not by their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import StateMismatchError
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.type_names import is_wider

#: Options that say which rows are late, not what the state is.
_LATENESS_OPTIONS = {"late_us", "late"}
#: Kinds whose states are the same: which rows are counted depends on whether a column can be null.
_COUNTS = {AccumulatorKind.COUNT_ROWS, AccumulatorKind.COUNT_VALID}
#: Kinds with the same sum: what happens when it overflows depends on ANSI mode, which is off in Spark 3.5 and on in Spark 4.
_INT_SUMS = {AccumulatorKind.SUM_INT, AccumulatorKind.SUM_INT_CHECKED}
#: Kinds of operators as a user calls them.
_OPERATORS = {
    OperatorKind.AGGREGATE: "an aggregation",
    OperatorKind.SESSION: "an aggregation by session windows",
    OperatorKind.DEDUPLICATE: "dropDuplicates",
    OperatorKind.JOIN: "a join of two streams",
    OperatorKind.TOP: "topN",
    OperatorKind.LIMIT: "limit",
    OperatorKind.GROUP_STATE: "applyInPandasWithState or applyInArrowWithState",
    OperatorKind.TRANSFORM: "transformWithState",
    OperatorKind.PARTITIONS: "a function with a state store",
}

#: Stands for the schema of a state whose stores are a program's own.
_NONE = StateSchema((), (), (), None, None, "")


def check_metadata(existing: StateMetadata, requested: StateMetadata) -> None:
    """Refuse a query that does not fit the state.

    Raises
    ------
    StateMismatchError
        Operator, output mode, schema or number of shards differ; names the first of these that does, and shows both.
    """
    facts = {"state": existing.state_name}
    # First, as all the rest follows from it.
    if _operator(existing) != _operator(requested):
        raise StateMismatchError(
            f"the state was made by {_operator(existing)}, and the query asks for {_operator(requested)}, which could not read its "
            "rows; nothing was changed; restore the query, or use another name for the new one",
            existing=_operator(existing),
            asked=_operator(requested),
            **facts,
        )
    check_output_mode(existing, requested.output_mode)
    for part in ("keys", "expiry_key", "options"):
        if _fixed_part(existing.schema or _NONE, part) != _fixed_part(requested.schema or _NONE, part):
            raise _mismatch(f"the query's {part} differ from those of the existing state", part, existing, requested)
    # After the keys: a query without any has one shard, and is another query. Where rows are partitioned by their keys, any number will
    # do: the state is rescaled.
    if existing.num_shards != requested.num_shards and not routing_keys(existing):
        raise StateMismatchError(
            unroutable(existing),
            existing=existing.num_shards,
            asked=requested.num_shards,
            **facts,
        )
    try:
        continued((existing.schema or _NONE).accumulators, (requested.schema or _NONE).accumulators)
    except ValueError as error:
        reason = f"the query's accumulators differ from those of the existing state: {error}"
        raise _mismatch(reason, "accumulators", existing, requested) from error


def check_output_mode(existing: StateMetadata, requested: str) -> None:
    """Refuse another output mode than a state's.

    Raises
    ------
    StateMismatchError
        It differs.
    """
    if existing.output_mode != requested:
        raise StateMismatchError(
            "the state was made in another output mode; use that, or another name",
            existing=existing.output_mode,
            asked=requested,
            state=existing.state_name,
        )


def routing_keys(metadata: StateMetadata) -> tuple[str, ...]:
    """Return the columns of a state's rows by whose hash they are partitioned.

    Empty where a program assigns rows to partitions itself, or one shard has all rows.
    """
    if metadata.output_mode == "keyed" or metadata.schema is None:
        return ()
    return tuple(field.name for field in metadata.schema.input_keys)


def unroutable(metadata: StateMetadata) -> str:
    """Return why a state without :func:`routing_keys` cannot be rescaled, and what to do."""
    if metadata.output_mode == "keyed":
        return (
            "the number of partitions is fixed for the life of a state whose partitions are a function's or a program's own: no one "
            "else knows which of its rows belong where; nothing was changed; use the existing number, or another name"
        )
    return "an operator without keys has one shard by nature; nothing was changed; leave shards out"


def fitting(
    schemas: Iterable[StateSchema | None], created: StateMetadata, requested: StateMetadata
) -> StateSchema | None:
    """Return the schema that a query would go on from; None if it begins with nothing.

    Parameters
    ----------
    schemas
        At least one: the state's schema at each batch that the query may begin with, the likelier one first. None if the state has
        nothing there.
    created
        The state's metadata; their schema is not looked at.

    Raises
    ------
    StateMismatchError
        The query fits none of the schemas; the error describes the first one.
    """
    refusal: StateMismatchError | None = None
    for schema in schemas:
        try:
            check_metadata(structs.replace(created, schema=requested.schema if schema is None else schema), requested)
        except StateMismatchError as error:
            refusal = refusal or error
        else:
            return schema
    assert refusal is not None
    raise refusal


def same_state(first: StateSchema | None, second: StateSchema | None) -> bool:
    """Return whether the rows of two schemas mean the same, column by column, and both schemas say what they mean or neither does."""
    first_accumulators, second_accumulators = (first or _NONE).accumulators, (second or _NONE).accumulators
    if not _have_meanings(first_accumulators) or not _have_meanings(second_accumulators):
        return list(map(_layout, first_accumulators)) == list(map(_layout, second_accumulators))
    return [(_identity(item), _layout(item)) for item in first_accumulators] == [
        (_identity(item), _layout(item)) for item in second_accumulators
    ]


def same_description(first: StateSchema | None, second: StateSchema | None) -> bool:
    """Return whether readers see the rows of two schemas, which mean the same, under the same names."""
    return (first or _NONE).shown == (second or _NONE).shown


def continued(existing: Sequence[Accumulator], requested: Sequence[Accumulator]) -> list[int | None]:
    """Return, for each accumulator that is asked for, the index of the existing one that it continues; None if it starts from nothing.

    Raises
    ------
    ValueError
        They do not go together; says why.
    """
    if not _have_meanings(existing) or not _have_meanings(requested):
        if list(map(_layout, existing)) != list(map(_layout, requested)):
            raise ValueError("the state does not say what its columns mean, so they are fixed")
        return list(range(len(requested)))
    indices = _matched(list(map(_identity, existing)), list(map(_identity, requested)))
    for item, index in zip(requested, indices, strict=True):
        if index is not None and (obstacle := _obstacle(existing[index], item)):
            raise ValueError(f"{item.meaning} {obstacle}")
    if existing and all(index is None for index in indices):
        raise ValueError("not one of the aggregates is there, so this is another query")
    return indices


def changes(existing: StateSchema | None, requested: StateSchema | None) -> tuple[str, str]:
    """Return which accumulators a query that fits starts from nothing, and which it leaves out, as a person reads them."""
    before, after = (existing or _NONE).accumulators, (requested or _NONE).accumulators
    indices = continued(before, after)
    begun = [item for item, index in zip(after, indices, strict=True) if index is None]
    return _accumulators_text(begun), _accumulators_text(
        [item for index, item in enumerate(before) if index not in indices]
    )


def _have_meanings(accumulators: Sequence[Accumulator]) -> bool:
    return all(item.meaning for item in accumulators)


def _identity(accumulator: Accumulator) -> tuple[str, str]:
    return accumulator.meaning, accumulator.cast


def _layout(accumulator: Accumulator) -> tuple[AccumulatorKind, list[tuple[str, str]]]:
    return accumulator.kind, list(map(_typed, accumulator.state))


def _matched(existing: Sequence[tuple[str, str]], requested: Sequence[tuple[str, str]]) -> list[int | None]:
    """Match accumulators of equal meaning and cast; then the remaining ones of equal meaning, if each side has one of it."""
    indices = {identity: existing.index(identity) if identity in existing else None for identity in requested}
    remaining = [index for index, identity in enumerate(existing) if identity not in indices]
    for meaning, cast in [identity for identity, index in indices.items() if index is None]:
        rivals = [identity for identity in indices if identity[0] == meaning and identity not in existing]
        candidates = [index for index in remaining if existing[index][0] == meaning]
        if len(rivals) == len(candidates) == 1:
            indices[meaning, cast] = candidates[0]
    return [indices[identity] for identity in requested]


def _obstacle(existing: Accumulator, requested: Accumulator) -> str:
    kinds = {existing.kind, requested.kind}
    if len(kinds) > 1 and not kinds <= _COUNTS and not kinds <= _INT_SUMS:
        return f"cannot go on as {requested.kind} from {existing.kind}"
    # Only a checked sum says beside the sum whether a value came.
    for before, after in zip(existing.state, requested.state, strict=kinds != _INT_SUMS):
        if not is_wider(before.type, after.type):
            return f"cannot become {after.type}, it is {before.type}"
    return ""


def _operator(metadata: StateMetadata) -> str:
    """Return what made a state, in a user's words."""
    if metadata.output_mode == "keyed":
        return "a keyed state store"
    schema = metadata.schema or _NONE
    if schema.operator is OperatorKind.DEDUPLICATE and schema.accumulators:
        return "dropDuplicatesWithinWatermark"
    if schema.operator is OperatorKind.TOP and schema.options.get("ties") == "last":
        return "keepLast"
    return _OPERATORS[schema.operator]


def _fixed_part(schema: StateSchema, part: str) -> Any:
    match part:
        case "keys":
            return list(map(_typed, schema.keys))
        case "options":
            return {name: option for name, option in schema.options.items() if name not in _LATENESS_OPTIONS}
        case _:
            return schema.expiry_key


def _mismatch(reason: str, part: str, existing: StateMetadata, requested: StateMetadata) -> StateMismatchError:
    return StateMismatchError(
        f"{reason}, whose rows it could not read; nothing was changed; restore the query, or use another name for the new one",
        existing=_part_text(existing.schema or _NONE, part),
        asked=_part_text(requested.schema or _NONE, part),
        state=existing.state_name,
    )


def _part_text(schema: StateSchema, part: str) -> str:
    match part:
        case "keys":
            return ", ".join(f"{field.name} {field.type}" for field in schema.keys)
        case "accumulators":
            return _accumulators_text(schema.accumulators)
        case "options":
            return str(schema.options)
        case _:
            return str(schema.expiry_key)


def _typed(field: Field) -> tuple[str, str]:
    return field.name, field.type


def _accumulators_text(accumulators: Iterable[Accumulator]) -> str:
    return ", ".join(f"{_named(item)} {' '.join(field.type for field in item.state)}" for item in accumulators)


def _named(accumulator: Accumulator) -> str:
    if not accumulator.meaning:
        return f"{accumulator.kind}({', '.join(accumulator.inputs)})"
    return f"{accumulator.kind}: {accumulator.meaning}" + (f" as {accumulator.cast}" if accumulator.cast else "")
