package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import org.apache.spark.api.python.PythonFunction;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GetArrayItem;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Pmod;
import org.apache.spark.sql.catalyst.expressions.PythonUDF;
import org.apache.spark.sql.catalyst.expressions.codegen.CodeAndComment;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.plans.logical.Union;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.WholeStageCodegenEvaluatorFactory;
import org.apache.spark.sql.execution.exchange.ReusedExchangeExec;
import org.apache.spark.sql.execution.metric.SQLMetrics;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import scala.collection.Seq;

/**
 * An operator whose tasks hand the rows over to the store actor of their node themselves (HandOver.java), in place of Python workers on both
 * sides of the exchange.
 */
class HandedOver {
    /** Setting of the session that switches it off. */
    static final String SETTING = "spark.statefleet.handOver";
    /** The column of an operator of several inputs that has the number of a row's input (spark_jobs/worker/task.py). */
    private static final String INPUT = "__input";

    /** The text of HandOver.java, without its comment. */
    static volatile String code;

    final RepartitionByExpression exchange;
    /** The facts of the operator, by the name of the exchange's column. */
    final JsonNode facts;
    /** The rows of each input that Python's map side reads. */
    private final ArrayList inputs;
    /** Null if rows reach the shards as they are. */
    private final PartialAggregation partial;

    private HandedOver(RepartitionByExpression exchange, JsonNode facts, ArrayList inputs, PartialAggregation partial) {
        this.exchange = exchange;
        this.facts = facts;
        this.inputs = inputs;
        this.partial = partial;
    }

    /** Returns the operator whose tasks a node runs; null for any other node, and where Python has to run. */
    static HandedOver of(LogicalPlan node, SparkSession session) {
        if (!isMapped(node) || !"true".equals(session.conf().get(SETTING, "true"))) {
            return null;
        }
        LogicalPlan below = projected((LogicalPlan) node.children().apply(0));
        if (!(below instanceof RepartitionByExpression)) {
            return null;
        }
        RepartitionByExpression exchange = (RepartitionByExpression) below;
        String route = Route.nameIn(exchange.partitionExpressions());
        JsonNode facts = route == null ? null : Route.facts(route);
        if (facts == null || facts.get("sockets").isNull()) {
            return null;
        }
        ArrayList inputs = new ArrayList();
        collect(exchange.child(), inputs);
        LogicalPlan first = (LogicalPlan) inputs.get(0);
        // Rows without columns, which are only counted, have nothing that could be sent.
        boolean hasColumns = !values(first).isEmpty();
        if (hasColumns && (facts.get("accumulators").isNull() || !LastBatch.repeats(Route.stateId(facts)))) {
            return new HandedOver(exchange, facts, inputs, null);
        }
        PartialAggregation partial = PartialAggregation.of(facts, first.output());
        // Python's map side aggregates what Spark cannot.
        return partial == null ? null : new HandedOver(exchange, facts, inputs, partial);
    }

    /** Adds the rows that map sides read, in the order of the operator's inputs. */
    private static void collect(LogicalPlan plan, ArrayList inputs) {
        LogicalPlan map = projected(plan);
        Seq children = map.children();
        if (isMapped(map)) {
            inputs.add(children.apply(0));
            return;
        }
        for (int i = 0; i < children.size(); i++) {
            collect((LogicalPlan) children.apply(i), inputs);
        }
    }

    private static boolean isMapped(LogicalPlan node) {
        return node.getClass().getSimpleName().endsWith("MapInArrow");
    }

    /** Whether a plan is only other names for an operator's columns. */
    static boolean isRenamed(LogicalPlan plan) {
        if (!(plan instanceof Project) || !isMapped(((Project) plan).child())) {
            return false;
        }
        Seq names = ((Project) plan).projectList();
        Seq columns = ((Project) plan).child().output();
        boolean same = names.size() == columns.size();
        for (int i = 0; same && i < columns.size(); i++) {
            Object column = names.apply(i) instanceof Alias ? ((Alias) names.apply(i)).child() : names.apply(i);
            same = column instanceof Attribute && ((Attribute) column).exprId().equals(((Attribute) columns.apply(i)).exprId());
        }
        return same;
    }

    /** Returns the plan below some projections. */
    private static LogicalPlan projected(LogicalPlan plan) {
        return plan instanceof Project ? projected(((Project) plan).child()) : plan;
    }

    /** Returns the rows to plan, for a number of shards. */
    LogicalPlan rows(int shards) {
        LogicalPlan first = (LogicalPlan) inputs.get(0);
        if (partial != null) {
            return first;
        }
        if (inputs.size() == 1) {
            ArrayList columns = values(first);
            columns.add(route(Columns.in(first.output(), "__hash"), shards));
            return new Project(Lists.seq(columns), first);
        }
        return united(shards);
    }

    /** Returns the planned rows with the route to one of a number of shards as their last column. */
    SparkPlan routed(SparkPlan rows, int shards) {
        return partial == null ? rows : partial.over(rows, route(partial.hash(), shards));
    }

    /** Returns the columns of an input that its shard reads. */
    private static ArrayList values(LogicalPlan rows) {
        ArrayList columns = new ArrayList();
        for (Object column : Lists.list(rows.output())) {
            if (!((Attribute) column).name().startsWith("__")) {
                columns.add(column);
            }
        }
        return columns;
    }

    /**
     * Returns the rows of all inputs as one: the number of the input, and then columns that have the names of the input columns in them, such
     * as `k0|k0` and `|r1`. Columns of a type share one, so that a row has few nulls.
     */
    private LogicalPlan united(int shards) {
        ArrayList types = new ArrayList();
        Attribute[][] placed = new Attribute[inputs.size()][];
        for (int i = 0; i < placed.length; i++) {
            placed[i] = placed(values((LogicalPlan) inputs.get(i)), types);
        }
        ArrayList children = new ArrayList();
        for (int i = 0; i < placed.length; i++) {
            LogicalPlan rows = (LogicalPlan) inputs.get(i);
            ArrayList columns = new ArrayList();
            columns.add(Columns.named(new Literal(Byte.valueOf((byte) i), DataTypes.ByteType), INPUT));
            for (int place = 0; place < types.size(); place++) {
                Attribute column = at(placed[i], place);
                columns.add(Columns.named(
                    column == null ? new Literal(null, (DataType) types.get(place)) : column, nameAt(placed, place)));
            }
            Alias route = route(Columns.in(rows.output(), "__hash"), shards);
            // A union has the column ids of its first child.
            columns.add(i == 0 ? route : Columns.named(route.child(), route.name()));
            children.add(new Project(Lists.seq(columns), rows));
        }
        return new Union(Lists.seq(children), false, false);
    }

    /** Returns the columns at their places among columns of these types, which are added to. */
    private static Attribute[] placed(ArrayList columns, ArrayList types) {
        Attribute[] placed = new Attribute[types.size() + columns.size()];
        for (Object column : columns) {
            DataType type = ((Attribute) column).dataType();
            int place = 0;
            while (place < types.size() && (placed[place] != null || !types.get(place).equals(type))) {
                place++;
            }
            if (place == types.size()) {
                types.add(type);
            }
            placed[place] = (Attribute) column;
        }
        return placed;
    }

    private static Attribute at(Attribute[] placed, int place) {
        return place < placed.length ? placed[place] : null;
    }

    private static String nameAt(Attribute[][] placed, int place) {
        String name = "";
        for (int i = 0; i < placed.length; i++) {
            Attribute column = at(placed[i], place);
            name += (i == 0 ? "" : "|") + (column == null ? "" : column.name());
        }
        return name;
    }

    /** Returns the column of the route to a shard, by a hash. */
    private Alias route(Expression hash, int shards) {
        Attribute route = (Attribute) exchange.partitionExpressions().apply(0);
        Literal number = new Literal(Integer.valueOf(shards), DataTypes.IntegerType);
        int[] routes = Arrays.copyOf(Shards.routes(shards), shards + 1);
        // No row has the last one. It makes the exchanges of two operators differ: Spark would run only one of two that are equal.
        routes[shards] = facts.get("state").asText().hashCode();
        Literal ofShards = new Literal(new GenericArrayData(routes), DataTypes.createArrayType(DataTypes.IntegerType, false));
        return Columns.named(new GetArrayItem(ofShards, new Pmod(hash, number), false), route.name(), route.exprId());
    }

    /** Returns the rows that the tasks of a node emit. */
    static RDD emitted(SparkPlan node, Expression function) {
        StatefulExchangeExec exchange = exchange((SparkPlan) node.children().apply(0));
        RDD rows = exchange.execute();
        Object[] references = new Object[] {
            exchange.facts().get("sockets").asText(), pickled(((PythonUDF) function).func()), exchange.batch(), exchange.shardsOfTasks(),
            exchange.actorsOfTasks(), exchange.routes(), withoutLast(exchange.schema()), node.schema(), node.conf().sessionLocalTimeZone(),
            exchange.sentRows()
        };
        CodeAndComment text = new CodeAndComment(
            code, (scala.collection.immutable.Map) scala.collection.immutable.Map$.MODULE$.empty());
        WholeStageCodegenEvaluatorFactory evaluators = new WholeStageCodegenEvaluatorFactory(
            HandOverExec.stageCode(text), SQLMetrics.createTimingMetric(node.sparkContext(), "time of the store actors", -1L), references);
        return rows.mapPartitionsWithEvaluator(evaluators, rows.elementClassTag());
    }

    private static StatefulExchangeExec exchange(SparkPlan node) {
        if (node instanceof ReusedExchangeExec) {
            return (StatefulExchangeExec) ((ReusedExchangeExec) node).child();
        }
        return node instanceof StatefulExchangeExec
            ? (StatefulExchangeExec) node : exchange((SparkPlan) node.children().apply(0));
    }

    /** Returns the pickled function of a node that runs Python, which Spark has as a sequence of boxed bytes. */
    private static byte[] pickled(PythonFunction function) {
        Seq boxed = function.command();
        byte[] bytes = new byte[boxed.size()];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = ((Number) boxed.apply(i)).byteValue();
        }
        return bytes;
    }

    private static StructType withoutLast(StructType type) {
        StructField[] fields = new StructField[type.length() - 1];
        for (int i = 0; i < fields.length; i++) {
            fields[i] = type.apply(i);
        }
        return new StructType(fields);
    }
}
