"""The kinds of accumulators that every supported aggregate is made of."""

from __future__ import annotations

from enum import StrEnum


class AccumulatorKind(StrEnum):
    """The primitives that every supported aggregate is made of. Nulls are ignored unless stated."""

    #: Rows; no input. State: one int64, never null.
    COUNT_ROWS = "count_rows"
    #: Rows in which every input is non-null. State: one int64, never null.
    COUNT_VALID = "count_valid"
    #: Wrapping int64 sum, as Spark without ANSI mode. State: one int64, null until a value came.
    SUM_INT = "sum_int"
    #: Float64 sum. State: one float64, null until a value came.
    SUM_FLOAT = "sum_float"
    #: Decimal sum. State: decimal (null once it overflowed its precision, and then for good) and ``is_empty`` boolean.
    SUM_DECIMAL = "sum_decimal"
    #: State: one value of the input's type, null until a value came. Float NaN is the largest value, as in Spark.
    MIN = "min"
    MAX = "max"
    #: State: the value and ``value_set`` boolean. A null is a value.
    FIRST = "first"
    LAST = "last"
    #: The same, skipping nulls (``ignorenulls=True``).
    FIRST_VALID = "first_valid"
    LAST_VALID = "last_valid"
    #: Integer sum that is null for good once it overflowed its type (64 bits; 32 of int32). State: int and ``is_empty`` boolean.
    SUM_INT_OR_NULL = "sum_int_or_null"
    #: The same, where overflow fails the batch: the shard raises before anything is committed.
    SUM_INT_CHECKED = "sum_int_checked"
    #: Float64 product. State: one float64, null until a value came.
    PRODUCT = "product"
    #: Bitwise. State: one integer of the input's type, null until a value came.
    BIT_AND = "bit_and"
    BIT_OR = "bit_or"
    BIT_XOR = "bit_xor"
    #: Value of the row with the largest (smallest) ordering; of equal ones the last. Inputs: value, ordering. State: the same two.
    MAX_BY = "max_by"
    MIN_BY = "min_by"
    #: Central moments of order two (Welford, merged as Chan et al.). Input float64; state: n, avg, m2, all float64.
    MOMENTS = "moments"
    #: Those of order three (state: n, avg, m2, m3) and four (and m4).
    MOMENTS_3 = "moments_3"
    MOMENTS_4 = "moments_4"
    #: Co-moments of rows in which both of two float64 inputs are there. State, all float64: n, averages of both, ck; and of
    #: CORRELATION the second moments of both.
    COVARIANCE = "covariance"
    CORRELATION = "correlation"
    #: Registers of six bits, ten a word, as Spark's HyperLogLogPlusPlus has them. Input: hash (int64). State: one field of words.
    #: Emits the sum of ``2**-register`` (float64), and how many registers are 0.
    DISTINCT_REGISTERS = "distinct_registers"
    #: Bits at positions (int64) below the number that the state has; and bits of other such states. State: one field of words.
    BITMAP = "bitmap"
    BITMAP_OR = "bitmap_or"
    #: A count-min sketch, of integers and of the two hashes of texts. State: one field of words: the total, a hash's factor for each
    #: line of the table, and the table. Options: ``depth`` (lines), ``initial`` (first words of an empty one). Emits Spark's bytes.
    COUNT_MIN = "count_min"
    COUNT_MIN_BYTES = "count_min_bytes"
    #: A histogram of ``bins`` bins (an option). State: one field of words: how many are used, and the place and height of each, in
    #: order, with room for one bin more. Emits them. Option ``floating``: whether inputs are doubles, or integers.
    HISTOGRAM = "histogram"
    #: All values, in the order of their arrival. State: a list of the input's type, never null.
    COLLECT_LIST = "collect_list"
    #: Distinct values: of -0.0 and 0.0 the one that came first; no NaN is another one, as in Spark. State: as COLLECT_LIST's.
    COLLECT_SET = "collect_set"
    #: Values with how often each came. Inputs: the value, and maybe how often (int64; none if not above 0). State: a list of values and
    #: counts, in which a value may stand several times. Emits what the option ``result`` says (``operators/aggregate_results.py``).
    COUNTED = "counted"
    #: HLL sketches of Apache DataSketches: of values (int64, string or binary), and of other sketches, as Spark's ``hll_union`` writes
    #: them. State: a list of int32 (``engine/hll_kernels.py``). Emits the sketch's bytes. Options: ``lg_k``, of a union that of one
    #: of nothing; ``may_differ``: whether sketches may have several.
    HLL_SKETCH = "hll_sketch"
    HLL_UNION = "hll_union"
    #: A value column of a keyed store: written whole, folded by nothing. No input; state: one value, null if it is null.
    VALUE = "value"
    #: A list or map of the user's, as an operator's schema tells of its state variables; their columns are VALUEs.
    LIST = "list"
    MAP = "map"
