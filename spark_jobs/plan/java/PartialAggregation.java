package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Murmur3Hash;
import org.apache.spark.sql.catalyst.expressions.RowOrdering;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateExpression$;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateFunction;
import org.apache.spark.sql.catalyst.expressions.aggregate.BitAndAgg;
import org.apache.spark.sql.catalyst.expressions.aggregate.BitOrAgg;
import org.apache.spark.sql.catalyst.expressions.aggregate.BitXorAgg;
import org.apache.spark.sql.catalyst.expressions.aggregate.Corr;
import org.apache.spark.sql.catalyst.expressions.aggregate.Count;
import org.apache.spark.sql.catalyst.expressions.aggregate.CovPopulation;
import org.apache.spark.sql.catalyst.expressions.aggregate.First;
import org.apache.spark.sql.catalyst.expressions.aggregate.HyperLogLogPlusPlus;
import org.apache.spark.sql.catalyst.expressions.aggregate.Kurtosis;
import org.apache.spark.sql.catalyst.expressions.aggregate.Last;
import org.apache.spark.sql.catalyst.expressions.aggregate.Max;
import org.apache.spark.sql.catalyst.expressions.aggregate.MaxBy;
import org.apache.spark.sql.catalyst.expressions.aggregate.Min;
import org.apache.spark.sql.catalyst.expressions.aggregate.MinBy;
import org.apache.spark.sql.catalyst.expressions.aggregate.Partial$;
import org.apache.spark.sql.catalyst.expressions.aggregate.Product;
import org.apache.spark.sql.catalyst.expressions.aggregate.Skewness;
import org.apache.spark.sql.catalyst.expressions.aggregate.VariancePop;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.aggregate.HashAggregateExec;
import org.apache.spark.sql.execution.aggregate.SortAggregateExec;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DecimalType;
import scala.Option;
import scala.collection.Seq;

/** The batch before, by state: what decides how the next one is planned. */
class LastBatch {
    /** Rows a group, in a whole batch, from which on a map task's rows are aggregated. */
    private static final int REPEATED = 2;
    /** Rows up to which more map tasks than cores cost more than they balance: each takes as long as some ten thousand rows. */
    private static final long FEW_ROWS = 10000L;
    private static final ConcurrentHashMap BY_STATE = new ConcurrentHashMap();

    private final long rows;
    private final long groups;

    private LastBatch(long rows, long groups) {
        this.rows = rows;
        this.groups = groups;
    }

    /** A batch without rows says nothing of the next one. */
    static void put(String state, long rows, long groups) {
        if (rows > 0) {
            BY_STATE.put(state, new LastBatch(rows, groups));
        }
    }

    /** True if the last batch had two rows a group; true if unknown, since hot keys are the worst case. */
    static boolean repeats(String state) {
        LastBatch last = (LastBatch) BY_STATE.get(state);
        return last == null || last.rows >= REPEATED * last.groups;
    }

    static boolean isSmall(String state) {
        LastBatch last = (LastBatch) BY_STATE.get(state);
        return last != null && last.rows <= FEW_ROWS;
    }
}

/**
 * Spark's own partial aggregation of an operator's rows in front of its exchange. It gives a row for each group of a map task: the keys, the
 * fields of the group's state, and how many rows there were.
 *
 * Groups need not be whole: the shard merges rows of a group (store_actors/operators/aggregate.py). So keys are compared by their bytes.
 */
class PartialAggregation {
    /** Number of rows that a partially aggregated row stands for. */
    static final String ROWS = "__rows";

    private final Seq keys;
    private final ArrayList functions = new ArrayList();
    /** The fields of the state, as the shard names them. */
    private final ArrayList fields = new ArrayList();
    /** Whether rows are sorted by group, as by Spark: a state has a value that does not stay in its place when it changes, as texts. */
    private boolean isSorted;

    private PartialAggregation(Seq keys) {
        this.keys = keys;
    }

    /** Returns the partial aggregation of rows; null if the state of an accumulator is no buffer of Spark's generated code. */
    static PartialAggregation of(JsonNode facts, Seq columns) {
        JsonNode accumulators = facts.get("accumulators");
        if (accumulators.isNull()) {
            return null;
        }
        HashMap byName = new HashMap();
        for (int i = 0; i < columns.size(); i++) {
            byName.put(((Attribute) columns.apply(i)).name(), columns.apply(i));
        }
        HashSet inputs = new HashSet();
        for (JsonNode accumulator : accumulators) {
            for (JsonNode name : accumulator.get("inputs")) {
                inputs.add(name.asText());
            }
        }
        ArrayList keys = new ArrayList();
        for (int i = 0; i < columns.size(); i++) {
            String name = ((Attribute) columns.apply(i)).name();
            if (!name.startsWith("__") && !inputs.contains(name)) {
                keys.add(columns.apply(i));
            }
        }
        PartialAggregation aggregation = new PartialAggregation(Lists.seq(keys));
        for (JsonNode accumulator : accumulators) {
            if (!aggregation.add(accumulator, byName)) {
                return null;
            }
        }
        boolean isOrdered = true;
        for (Object key : keys) {
            isOrdered &= RowOrdering.isOrderable(((Attribute) key).dataType());
        }
        return isOrdered || !aggregation.isSorted ? aggregation : null;
    }

    private boolean add(JsonNode accumulator, Map columns) {
        ArrayList inputs = new ArrayList();
        String last = null;
        for (JsonNode name : accumulator.get("inputs")) {
            last = name.asText();
            inputs.add(columns.get(last));
        }
        ArrayList names = new ArrayList();
        for (JsonNode name : accumulator.get("state")) {
            names.add(name.asText());
        }
        String kind = accumulator.get("kind").asText();
        boolean isOfWords = kind.equals("distinct_registers");
        // Spark's own hashes the values itself; they are in a column beside that of the hashes, which the shard reads.
        AggregateFunction function = !isOfWords ? function(kind, inputs)
            : registers((Expression) columns.get("__" + last), accumulator.get("words").asInt());
        if (function == null) {
            return false;
        }
        Seq buffer = function.inputAggBufferAttributes();
        if (buffer.size() != (isOfWords ? accumulator.get("words").asInt() : names.size())) {
            return false;
        }
        functions.add(function);
        for (int i = 0; i < buffer.size(); i++) {
            Attribute field = (Attribute) buffer.apply(i);
            isSorted |= !UnsafeRow.isMutable(field.dataType());
            fields.add(Columns.named(field, "|" + (isOfWords ? names.get(0) + "#" + i : (String) names.get(i))));
        }
        return true;
    }

    /** Returns Spark's HyperLogLog++ with as many words of registers, of which there are a power of two, ten in a word. */
    private static AggregateFunction registers(Expression values, int words) {
        int precision = 31 - Integer.numberOfLeadingZeros(10 * words);
        // Spark rounds up to the precision that a standard deviation needs.
        return new HyperLogLogPlusPlus(values, 1.106 * 1.000001 / Math.sqrt(1 << precision), 0, 0);
    }

    /** Returns Spark's function of a kind of accumulator (coordinator/model/accumulator_kinds.py); null if it has none. */
    private static AggregateFunction function(String kind, List inputs) {
        Expression first = inputs.isEmpty() ? null : (Expression) inputs.get(0);
        Expression second = inputs.size() < 2 ? null : (Expression) inputs.get(1);
        switch (kind) {
            case "count_rows":
                return new Count(Lists.seq(Arrays.asList(new Object[] {new Literal(Integer.valueOf(1), DataTypes.IntegerType)})));
            case "count_valid":
                return new Count(Lists.seq(inputs));
            case "sum_int":
            case "sum_float":
                return Sums.of(first, false);
            case "sum_decimal":
                return Sums.of(new Cast(first, summed((DecimalType) first.dataType()), Option.apply(null)), false);
            case "sum_int_or_null":
            case "sum_int_checked":
                // One that overflowed is null, by which the shard knows it.
                return first.dataType().equals(DataTypes.LongType) ? Sums.of(first, true) : null;
            case "min":
                return new Min(first);
            case "max":
                return new Max(first);
            case "first":
            case "first_valid":
                return second != null ? null : new First(first, kind.equals("first_valid"));
            case "last":
            case "last_valid":
                return second != null ? null : new Last(first, kind.equals("last_valid"));
            case "max_by":
                return new MaxBy(first, second);
            case "min_by":
                return new MinBy(first, second);
            case "product":
                return new Product(first);
            case "bit_and":
                return new BitAndAgg(first);
            case "bit_or":
                return new BitOrAgg(first);
            case "bit_xor":
                return new BitXorAgg(first);
            case "moments":
                return new VariancePop(first);
            case "moments_3":
                return new Skewness(first);
            case "moments_4":
                return new Kurtosis(first);
            case "covariance":
                return new CovPopulation(first, second);
            case "correlation":
                return new Corr(first, second);
            default:
                return null;
        }
    }

    /** Returns the type of the values whose sum has a type: Spark's sum of decimals has ten digits more, or 38. */
    private static DecimalType summed(DecimalType sum) {
        return sum.precision() == DecimalType.MAX_PRECISION() ? sum : new DecimalType(sum.precision() - 10, sum.scale());
    }

    /** Returns the hash of the keys, as shards go by it. */
    Expression hash() {
        return keys.isEmpty() ? new Literal(Integer.valueOf(0), DataTypes.IntegerType) : (Expression) new Murmur3Hash(keys, 42);
    }

    /** Returns the aggregated rows; `route` is their last column. */
    SparkPlan over(SparkPlan rows, Object route) {
        AggregateFunction count = function("count_rows", new ArrayList());
        ArrayList all = new ArrayList(functions);
        all.add(count);
        ArrayList uses = new ArrayList();
        ArrayList attributes = new ArrayList();
        ArrayList buffers = Lists.list(keys);
        for (int i = 0; i < all.size(); i++) {
            AggregateFunction function = (AggregateFunction) all.get(i);
            uses.add(AggregateExpression$.MODULE$.apply(function, Partial$.MODULE$, false, Option.apply(null)));
            attributes.addAll(Lists.list(function.aggBufferAttributes()));
            buffers.addAll(Lists.list(function.inputAggBufferAttributes()));
        }
        Option none = Option.apply(null);
        SparkPlan aggregated = isSorted
            ? (SparkPlan) new SortAggregateExec(none, false, none, keys, Lists.seq(uses), Lists.seq(attributes), 0, Lists.seq(buffers), rows)
            : new HashAggregateExec(none, false, none, keys, Lists.seq(uses), Lists.seq(attributes), 0, Lists.seq(buffers), rows);
        ArrayList columns = new ArrayList();
        for (int i = 0; i < keys.size(); i++) {
            Attribute key = (Attribute) keys.apply(i);
            columns.add(Columns.named(key, "|" + key.name()));
        }
        columns.addAll(fields);
        columns.add(Columns.named((Attribute) count.inputAggBufferAttributes().apply(0), ROWS));
        columns.add(route);
        return new ProjectExec(Lists.seq(columns), aggregated);
    }
}
