"""Where each field of a schema sits in a row of words, and which compiled step moves each accumulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from coordinator.errors import InvalidRequestError
from store_actors.accumulators import RULES, OpCode, Ordering, Rule, StateForm
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.kernels import ACCUMULATE_WORDS, FLAG_BITS
from store_actors.engine.list_kernels import FLOAT_SET, LIST, SET
from store_actors.schema import Accumulator, Field, StateSchema, string_to_type

__all__ = ["Feed", "FieldSlot", "ListSlot", "RowLayout", "words_of"]


def words_of(data_type: pa.DataType) -> int:
    """64-bit words that a value of the type takes: two for decimals and lists (extent and length), one for everything else."""
    return 2 if pa.types.is_decimal(data_type) or pa.types.is_list(data_type) else 1


@dataclass(frozen=True, slots=True)
class FieldSlot:
    """A field's place in a row: its first word and its flag bit (a key's: null, a state field's: valid)."""

    name: str
    type: pa.DataType
    word: int
    flag_word: int
    flag: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class ListSlot:
    """A state field whose list grows: its first word, what kind of list it is (``list_kernels``), and the words of an element."""

    word: int
    kind: int
    width: int
    #: Whether elements are ids in the table's pool of strings.
    is_text: bool


class RowLayout:
    """Layout of the rows of one schema, and of the two kinds of batches that are folded into them.

    Parameters
    ----------
    schema
        The operator's schema.

    Attributes
    ----------
    raw, partial
        How batches of raw inputs (``schema.raw_schema()``) and of partial accumulators (``schema.row_schema()``) are folded.
    lists
        State fields whose lists grow.
    initial
        The words of a new group.

    Raises
    ------
    InvalidRequestError
        More than 31 key leaves.
    """

    def __init__(self, schema: StateSchema) -> None:
        if len(schema.keys) > FLAG_BITS:
            raise InvalidRequestError(
                f"a stateful operator groups by at most {FLAG_BITS} columns; group by fewer, or by a struct's hash",
                columns=len(schema.keys),
            )
        self.schema = schema
        flags = len(schema.keys) + len(schema.state_fields)
        self.flag_words = 1 + max(0, -(-(flags - FLAG_BITS) // 64))
        self.keys: tuple[FieldSlot, ...] = self._place(schema.keys, self.flag_words, 0, is_key=True)
        self.key_words = sum(words_of(slot.type) for slot in self.keys)
        self.state: tuple[FieldSlot, ...] = self._place(
            schema.state_fields, self.flag_words + self.key_words, len(schema.keys), is_key=False
        )
        self.row_words = self.flag_words + self.key_words + sum(words_of(slot.type) for slot in self.state)
        self.key_mask = np.uint64((1 << len(schema.keys)) - 1)
        fields = (*self.keys, *self.state)
        self.expiry_word = next((slot.word for slot in fields if slot.name == schema.expiry_key), -1)
        self.lists: Mapping[str, ListSlot] = {
            slot.name: _list_slot(slot, RULES[accumulator.kind])
            for accumulator in schema.accumulators
            if RULES[accumulator.kind].form is StateForm.GROWING
            for slot in self.slots_of(accumulator)
        }
        self.initial: Words = self._initial()
        self.raw = Feed(self, merge=False)
        self.partial = Feed(self, merge=True)

    def _place(self, fields: tuple[Field, ...], word: int, bit: int, *, is_key: bool) -> tuple[FieldSlot, ...]:
        slots = []
        for position, field in enumerate(fields, start=bit):
            flag_word, flag_bit = (0, position) if position < FLAG_BITS else divmod(position - FLAG_BITS, 64)
            flag_word += position >= FLAG_BITS
            data_type = string_to_type(field.type)
            slots.append(FieldSlot(field.name, data_type, word, flag_word, 1 << flag_bit, is_key))
            word += words_of(data_type)
        return tuple(slots)

    def slots_of(self, accumulator: Accumulator) -> list[FieldSlot]:
        """Places of an accumulator's state fields."""
        by_name = {slot.name: slot for slot in self.state}
        return [by_name[field.name] for field in accumulator.state]

    def _initial(self) -> Words:
        words = np.zeros(self.row_words, np.uint64)
        for accumulator in self.schema.accumulators:
            slots, rule = self.slots_of(accumulator), RULES[accumulator.kind]
            for slot in slots[rule.nullable_fields :]:
                words[slot.flag_word] |= np.uint64(slot.flag)
            for slot, word in zip(slots, rule.initial, strict=False):
                words[slot.word] = word
        return words


class Feed:
    """How one kind of batch is folded into rows: the columns it carries and the compiled step of each accumulator.

    Attributes
    ----------
    inputs
        Columns besides the keys.
    operations
        One line of ``ACCUMULATE_WORDS`` int64 an accumulator, for ``kernels.accumulate``.
    lists
        State fields whose lists grow, each with the column that it grows by.
    limits
        Largest unscaled values (high word, low word) of decimal sums.
    """

    def __init__(self, layout: RowLayout, *, merge: bool) -> None:
        self._merge = merge
        self.inputs: tuple[Field, ...] = layout.schema.state_fields if merge else layout.schema.inputs
        limits: list[tuple[int, int]] = []
        operations = [
            self._operation(item, layout.slots_of(item), limits)
            for item in layout.schema.accumulators
            if RULES[item.kind].form is StateForm.FOLDED
        ]
        self.operations: Slots = np.array(operations, np.int64).reshape(-1, ACCUMULATE_WORDS)
        self.lists: tuple[tuple[ListSlot, int], ...] = tuple(
            (layout.lists[item.state[0].name], self._input_column(item.state[0].name if merge else item.inputs[0]))
            for item in layout.schema.accumulators
            if RULES[item.kind].form is StateForm.GROWING
        )
        self.limits: Slots = np.array(limits, np.int64).reshape(-1, 2)

    def _operation(self, accumulator: Accumulator, slots: list[FieldSlot], limits: list[tuple[int, int]]) -> list[int]:
        names = [field.name for field in accumulator.state] if self._merge else list(accumulator.inputs)
        first, rule = slots[0], RULES[accumulator.kind]
        code = self._code(rule, first.type)
        columns = [self._input_column(name) for name in names]
        wide = words_of(first.type) == 2
        a = columns[0] if columns else -1
        b = a + 1 if wide else (columns[1] if code is OpCode.MERGE_MOMENTS else -1)
        c = columns[-1] if self._merge and len(columns) > 1 else -1
        extra = skip_nulls = 0
        if code is OpCode.ADD_DECIMAL:
            extra = len(limits)
            bound = 10**first.type.precision - 1
            limits.append((bound >> 64, int(np.uint64(bound & (2**64 - 1)).view(np.int64))))
        elif code in (OpCode.FIRST, OpCode.LAST):
            extra = 2 if wide else 1
            skip_nulls = int(rule.skips_nulls)
        flag = int(np.uint64(first.flag).view(np.int64))
        return [int(code), a, b, c, first.word, first.flag_word, flag, extra, skip_nulls]

    def _code(self, rule: Rule, data_type: pa.DataType) -> OpCode:
        code = rule.merge if self._merge else rule.raw
        assert code is not None, "a kind that is folded has its steps"
        return code if isinstance(code, OpCode) else code[_ordering(data_type)]

    def _input_column(self, name: str) -> int:
        """First column of an input in the words of an encoded batch."""
        column = 0
        for field in self.inputs:
            if field.name == name:
                return column
            column += words_of(string_to_type(field.type))
        raise InvalidRequestError("an accumulator reads a column that the batch does not carry", column=name)


def _list_slot(slot: FieldSlot, rule: Rule) -> ListSlot:
    """What a list that grows is made of."""
    element = slot.type.value_type
    kind = LIST
    if rule.distinct:
        kind = FLOAT_SET if pa.types.is_floating(element) else SET
    return ListSlot(slot.word, kind, words_of(element), _ordering(element) is Ordering.STRING)


def _ordering(data_type: pa.DataType) -> Ordering:
    if pa.types.is_floating(data_type):
        return Ordering.FLOAT
    if pa.types.is_decimal(data_type):
        return Ordering.DECIMAL
    if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
        return Ordering.STRING
    return Ordering.INT
