"""The layout of a schema's fields in a row of words, and the compiled step that moves each accumulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError, SumOverflowError
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, StateSchema
from coordinator.model.type_names import is_counted, is_growing, is_nested, string_to_type
from store_actors.engine.accumulator_rules import RULES, Ordering, Rule, StateForm
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.index_kernels import FLAG_BITS
from store_actors.engine.list_kernels import FLOAT_SET, LIST, SET
from store_actors.engine.op_code_kernels import OpCode
from store_actors.engine.row_kernels import ACCUMULATE_WORDS
from store_actors.engine.words import is_text, parts_of, words_of

#: State fields of a correlation; a covariance has fewer.
_CORRELATION_FIELDS = 6
#: Steps that compare arrays and structs.
_NESTED_STEPS = (OpCode.MIN_NESTED, OpCode.MAX_NESTED, OpCode.MIN_BY_NESTED, OpCode.MAX_BY_NESTED)


def stored_type(data_type: pa.DataType) -> pa.DataType:
    """Return the Arrow type of the words of values of a type: binary for arrays, maps and structs."""
    return pa.binary() if pa.types.is_nested(data_type) else data_type


def _stored_field(name: str) -> pa.DataType:
    """Return :func:`stored_type` of a type named in a schema; of a list that grows, of its elements."""
    view_type = string_to_type(name)
    if is_counted(name):
        value, count = view_type.value_type
        element = pa.struct([value.with_type(stored_type(value.type)), count])
    elif is_growing(name):
        element = stored_type(view_type.value_type)
    else:
        return pa.binary() if is_nested(name) else view_type
    return pa.list_(view_type.value_field.with_type(element))


@dataclass(frozen=True, slots=True)
class FieldSlot:
    """The location of a field in a row: its first word and its flag bit (a key's: null, a state field's: valid)."""

    name: str
    #: Arrow type of its words: binary for arrays, maps and structs, which are stored as bytes (``words.py``).
    type: pa.DataType
    word: int
    flag_word: int
    flag: int
    is_key: bool
    #: The field's own type, if that is not `type`; None of any other field.
    nested: pa.DataType | None = None
    #: As :func:`words_of`: look-ups of a few keys ask for it, and for the next ones, by the thousand.
    words: int = field(init=False)
    #: ``is_text``, ``is_list``: Whether it is an id in a pool, or an extent of a list.
    is_text: bool = field(init=False)
    is_list: bool = field(init=False)
    #: Whether a word is a value as Arrow has it.
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        derived = {
            "words": words_of(self.type),
            "is_text": is_text(self.type),
            "is_list": pa.types.is_list(self.type),
            "is_plain": pa.types.is_primitive(self.type) and self.type.bit_width == 64,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def view_type(self) -> pa.DataType:
        """The field's Arrow type."""
        return self.type if self.nested is None else self.nested

    @classmethod
    def of(cls, field: Field, word: int, flag_word: int, flag: int, *, is_key: bool) -> FieldSlot:
        """Return the slot of a field."""
        view_type, stored = string_to_type(field.type), _stored_field(field.type)
        nested = None if view_type == stored else view_type
        return cls(field.name, stored, word, flag_word, flag, is_key, nested)


def all_words(fields: Sequence[FieldSlot]) -> Slots:
    """Return the words that some fields are made of, flags among them."""
    words = {slot.word + number for slot in fields for number in range(slot.words)}
    return np.array(sorted(words | {slot.flag_word for slot in fields}), np.int64)


@dataclass(frozen=True, slots=True)
class Sketch:
    """An HLL sketch: of integers, of strings or of other sketches."""

    is_text: bool
    is_union: bool
    #: Its precision; of other sketches that of none.
    lg_k: int
    #: Whether other sketches may have several.
    may_differ: bool


@dataclass(frozen=True, slots=True)
class ListSlot:
    """A state field whose list grows: its first word, what kind of list it is (``list_kernels``), and the words of an element."""

    word: int
    kind: int
    width: int
    #: Whether elements are, or begin with, ids in the table's pool of strings.
    is_text: bool
    #: Whether elements end with how often they came.
    is_counted: bool = False
    #: The HLL sketch that it is (``hll_kernels.py``), if it is one.
    sketch: Sketch | None = None


class RowLayout:
    """Layout of the rows of one schema, and of the two kinds of batches that are folded into them."""

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        in_word_0 = min(len(schema.keys), FLAG_BITS)
        self.flag_words = 1 + max(0, -(-(in_word_0 + len(schema.state_fields) - FLAG_BITS) // 64))
        # A row's number is never null, and the keys before it are laid out as they are without it.
        can_be_null = sum(field.name != ROW_COLUMN for field in schema.keys)
        self.null_words = max(0, -(-(can_be_null - FLAG_BITS) // 64))
        self.keys: tuple[FieldSlot, ...] = self._place_keys()
        #: Whether a look-up of a key needs the pool.
        self.has_text_keys = any(slot.is_text for slot in self.keys)
        #: Number of words of the key beside `key_mask` in word 0: nulls of keys beyond the first 31 (`null_words`), then values.
        self.key_words = self.null_words + sum(slot.words for slot in self.keys)
        self.state: tuple[FieldSlot, ...] = self._place_state(self.flag_words + self.key_words, in_word_0)
        self.row_words = self.flag_words + self.key_words + sum(slot.words for slot in self.state)
        self.key_mask = np.uint64((1 << in_word_0) - 1)
        #: `key_mask` without the last key.
        self.chain_mask = np.uint64((1 << min(max(0, len(schema.keys) - 1), FLAG_BITS)) - 1)
        fields = (*self.keys, *self.state)
        self.expiry_word = next((slot.word for slot in fields if slot.name == schema.expiry_key), -1)
        self.lists: Mapping[str, ListSlot] = {
            slot.name: _list_slot(slot, accumulator, schema)
            for accumulator in schema.accumulators
            if RULES[accumulator.kind].form is StateForm.GROWING
            for slot in self.slots_of(accumulator)
        }
        self.fails_on_overflow = any(RULES[accumulator.kind].fails_on_overflow for accumulator in schema.accumulators)
        self.initial: Words = self._initial()
        #: ``raw``, ``partial``: How batches of raw inputs (``schema.raw_schema()``) and of partial accumulators
        #: (``schema.row_schema()``) are folded.
        self.raw = Feed(self, merge=False)
        self.partial = Feed(self, merge=True)

    def _place_keys(self) -> tuple[FieldSlot, ...]:
        slots, word = [], self.flag_words + self.null_words
        for position, key in enumerate(self.schema.keys):
            if position < FLAG_BITS:
                flag_word, flag = 0, 1 << position
            else:
                beyond, bit = divmod(position - FLAG_BITS, 64)
                flag_word, flag = (0, 0) if key.name == ROW_COLUMN else (self.flag_words + beyond, 1 << bit)
            slots.append(FieldSlot.of(key, word, flag_word, flag, is_key=True))
            word += slots[-1].words
        return tuple(slots)

    def _place_state(self, word: int, bit: int) -> tuple[FieldSlot, ...]:
        slots = []
        for position, state_field in enumerate(self.schema.state_fields, start=bit):
            flag_word, flag_bit = (0, position) if position < FLAG_BITS else divmod(position - FLAG_BITS, 64)
            flag_word += position >= FLAG_BITS
            slots.append(FieldSlot.of(state_field, word, flag_word, 1 << flag_bit, is_key=False))
            word += slots[-1].words
        return tuple(slots)

    def null_bits(self, keys: Iterable[FieldSlot]) -> dict[int, np.uint64]:
        """Return the words of a row that have the null bits of these keys, each with these bits."""
        bits: dict[int, int] = {}
        for slot in keys:
            bits[slot.flag_word] = bits.get(slot.flag_word, 0) | slot.flag
        return {word: np.uint64(word_bits) for word, word_bits in bits.items()}

    def slots_of(self, accumulator: Accumulator) -> list[FieldSlot]:
        """Return the slots of an accumulator's state fields."""
        by_name = {slot.name: slot for slot in self.state}
        return [by_name[field.name] for field in accumulator.state]

    def check_overflow(self, rows: Words) -> None:
        """Refuse rows in which a checked sum has overflowed, before they are committed: it is null though a value came.

        Raises
        ------
        SumOverflowError
            In Spark's words; says which sum.
        """
        for accumulator in self.schema.accumulators:
            if not RULES[accumulator.kind].fails_on_overflow:
                continue
            total, is_empty = self.slots_of(accumulator)
            is_null = rows[:, total.flag_word] & np.uint64(total.flag) == 0
            if np.any(is_null & (rows[:, is_empty.word] == 0)):
                raise SumOverflowError(
                    f"{_overflow_words(total.type)}; the batch was not committed; state and checkpoint are as before it",
                    aggregate=accumulator.meaning or accumulator.kind.value,
                )

    def _initial(self) -> Words:
        words = np.zeros(self.row_words, np.uint64)
        for accumulator in self.schema.accumulators:
            slots, rule = self.slots_of(accumulator), RULES[accumulator.kind]
            for slot in slots[rule.nullable_fields :]:
                words[slot.flag_word] |= np.uint64(slot.flag)
            for slot, word in zip(slots, rule.initial, strict=False):
                words[slot.word] = word
            for number, word in enumerate(accumulator.options.get("initial", ())):
                words[slots[0].word + number] = word
        return words


class Feed:
    """The rules by which one kind of batch is folded into rows: the columns it carries and the compiled step of each accumulator."""

    def __init__(self, layout: RowLayout, *, merge: bool) -> None:
        self._merge = merge
        self.inputs: tuple[Field, ...] = layout.schema.state_fields if merge else layout.schema.inputs
        limits: list[tuple[int, int]] = []
        operations = [
            self._operation(item, layout.slots_of(item), limits)
            for item in layout.schema.accumulators
            if RULES[item.kind].form is StateForm.FOLDED
        ]
        #: One line of ``ACCUMULATE_WORDS`` int64 an accumulator, for ``row_kernels.accumulate``: the step; its columns: first word
        #: of the first one, the word or column after that (or the parts of a nested type that is compared, in `limits`), the first word
        #: of the last one (-1: none); word, flag word and flag of the first state field; the step's option; whether it skips
        #: nulls; word, flag word and flag of the last state field.
        self.operations: Slots = np.array(operations, np.int64).reshape(-1, ACCUMULATE_WORDS)
        #: State fields whose lists grow, each with the column that it grows by, and the one of how often (-1: once).
        self.lists: tuple[tuple[ListSlot, int, int], ...] = tuple(
            (layout.lists[item.state[0].name], *self._growth(item))
            for item in layout.schema.accumulators
            if RULES[item.kind].form is StateForm.GROWING
        )
        #: Largest unscaled values (high word, low word) of decimal sums; parts of nested types that are compared
        #: (``nested_kernels.py``).
        self.limits: Slots = np.array(limits, np.int64).reshape(-1, 2)

    def _operation(self, accumulator: Accumulator, slots: list[FieldSlot], limits: list[tuple[int, int]]) -> list[int]:
        names = [field.name for field in accumulator.state] if self._merge else list(accumulator.inputs)
        first, last, rule = slots[0], slots[-1], RULES[accumulator.kind]
        compared = slots[rule.compared]
        code = self._code(rule, compared)
        columns = [self._input_column(name) for name in names]
        wide = words_of(first.type) == 2
        a = columns[0] if columns else -1
        b = a + 1 if wide else (columns[1] if code is OpCode.CO_MOMENTS else -1)
        c = columns[-1] if len(columns) > 1 else -1
        extra = self._extra(code, slots, accumulator)
        if code is OpCode.ADD_DECIMAL:
            extra = len(limits)
            bound = 10**first.type.precision - 1
            limits.append((bound >> 64, _signed(bound & (2**64 - 1))))
        if code in _NESTED_STEPS:
            b = len(limits)
            limits.extend(parts_of(compared.view_type))
        target = [first.word, first.flag_word, _signed(first.flag)]
        return [
            int(code), a, b, c, *target, extra, int(rule.skips_nulls), last.word, last.flag_word, _signed(last.flag)
        ]  # fmt: skip

    def _growth(self, accumulator: Accumulator) -> tuple[int, int]:
        """Return the columns that a list grows by."""
        if self._merge:
            return self._input_column(accumulator.state[0].name), -1
        value, *often = accumulator.inputs
        return self._input_column(value), self._input_column(often[0]) if often else -1

    @staticmethod
    def _extra(code: OpCode, slots: list[FieldSlot], accumulator: Accumulator) -> int:
        """Return the step's own parameter, column 7 of its line."""
        first = slots[0]
        if code in (OpCode.COUNT_LONG, OpCode.COUNT_HASHES, OpCode.MERGE_COUNTS):
            return int(accumulator.options["depth"]) << 32 | words_of(first.type)
        if code is OpCode.ADD_TO_BINS:
            return int(accumulator.options["floating"]) << 32 | words_of(first.type)
        if code in (OpCode.MOMENTS, OpCode.MERGE_MOMENTS):
            return len(slots) - 1
        if code in (OpCode.CO_MOMENTS, OpCode.MERGE_CO_MOMENTS):
            return int(len(slots) == _CORRELATION_FIELDS)
        if code is OpCode.ADD_INT_CHECKED:
            return 32 if pa.types.is_int32(first.type) else 64
        return words_of(first.type)

    def _code(self, rule: Rule, compared: FieldSlot) -> OpCode:
        code = rule.merge if self._merge else rule.raw
        assert code is not None, "a kind that is folded has its steps"
        if isinstance(code, OpCode):
            return code
        return code[_ordering(compared.type) if compared.nested is None else Ordering.NESTED]

    def _input_column(self, name: str) -> int:
        column = 0
        for input_field in self.inputs:
            if input_field.name == name:
                return column
            column += words_of(_stored_field(input_field.type))
        raise InvalidRequestError("an accumulator reads a column that the batch does not carry", column=name)


def _overflow_words(data_type: pa.DataType) -> str:
    if pa.types.is_int64(data_type):
        return (
            "[ARITHMETIC_OVERFLOW] long overflow. Use 'try_sum' to tolerate overflow and return NULL instead. If necessary set "
            '"spark.sql.ansi.enabled" to "false" to bypass this error'
        )
    kind = "long" if pa.types.is_duration(data_type) else "integer"
    return f"[INTERVAL_ARITHMETIC_OVERFLOW] {kind} overflow. Use 'try_sum' to tolerate overflow and return NULL instead"


def _signed(word: int) -> int:
    """Return an unsigned word as the int64 of the same bits."""
    return int(np.uint64(word).view(np.int64))


def _list_slot(slot: FieldSlot, accumulator: Accumulator, schema: StateSchema) -> ListSlot:
    """Return the first word, the kind and the elements of a list that grows."""
    element, kind, options = slot.type.value_type, accumulator.kind, accumulator.options
    if kind in (AccumulatorKind.HLL_SKETCH, AccumulatorKind.HLL_UNION):
        (value,) = (
            _stored_field(input_field.type) for input_field in schema.inputs if input_field.name in accumulator.inputs
        )
        is_text, is_union = _ordering(value) is Ordering.STRING, kind is AccumulatorKind.HLL_UNION
        sketch = Sketch(is_text, is_union, int(options["lg_k"]), bool(options.get("may_differ", False)))
        return ListSlot(slot.word, LIST, 1, is_text=False, sketch=sketch)
    if pa.types.is_struct(element):
        value = element.field(0).type
        return ListSlot(slot.word, LIST, words_of(value) + 1, _ordering(value) is Ordering.STRING, is_counted=True)
    distinct = FLOAT_SET if pa.types.is_floating(element) else SET
    how = distinct if RULES[kind].distinct else LIST
    return ListSlot(slot.word, how, words_of(element), _ordering(element) is Ordering.STRING)


def _ordering(data_type: pa.DataType) -> Ordering:
    if pa.types.is_floating(data_type):
        return Ordering.FLOAT
    if pa.types.is_decimal(data_type):
        return Ordering.DECIMAL
    if is_text(data_type):
        return Ordering.STRING
    return Ordering.INT
