package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GetArrayItem;
import org.apache.spark.sql.catalyst.expressions.KnownNullable;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Pmod;
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

/** What is shuffled to the shards of an operator: the rows of its inputs, and the route to a shard as their last column. */
class OperatorRows {
    /** The column of an operator of several inputs that has the number of a row's input (store_actors/client/operator_task.py). */
    private static final String INPUT = "__input";

    final RepartitionByExpression exchange;
    /** The facts of the operator, by the name of the exchange's column. */
    final JsonNode facts;
    private final ArrayList inputs = new ArrayList();
    /** Null if rows reach the shards as they are. */
    private final PartialAggregation partial;

    private OperatorRows(RepartitionByExpression exchange, JsonNode facts) {
        this.exchange = exchange;
        this.facts = facts;
        collect(exchange.child(), inputs);
        LogicalPlan first = (LogicalPlan) inputs.get(0);
        // Rows without columns, which are only counted, have nothing that could be sent.
        boolean isAggregated = !facts.get("accumulators").isNull()
            && (values(first).isEmpty() || LastBatch.repeats(Route.stateId(facts)));
        partial = isAggregated ? PartialAggregation.of(facts, first.output()) : null;
    }

    /** Returns the rows of an operator whose exchange a node is; null for any other node. */
    static OperatorRows of(LogicalPlan node) {
        if (!(node instanceof RepartitionByExpression)) {
            return null;
        }
        RepartitionByExpression exchange = (RepartitionByExpression) node;
        String route = Route.nameIn(exchange.partitionExpressions());
        return route == null ? null : new OperatorRows(exchange, Route.facts(route));
    }

    /** Whether a user's function, in a Python worker, gets the rows. */
    boolean areOfFunction() {
        return !facts.get("by_python").isNull();
    }

    /** Adds the rows that map sides read, in the order of the operator's inputs. */
    private static void collect(LogicalPlan plan, ArrayList inputs) {
        LogicalPlan map = projected(plan);
        Seq children = map.children();
        if (HandedOver.isMapped(map)) {
            inputs.add(children.apply(0));
            return;
        }
        for (int i = 0; i < children.size(); i++) {
            collect((LogicalPlan) children.apply(i), inputs);
        }
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
        if (inputs.size() > 1) {
            return united(shards);
        }
        ArrayList columns = areOfFunction() ? named(values(first)) : values(first);
        columns.add(route(Columns.in(first.output(), "__hash"), shards));
        return new Project(Lists.seq(columns), first);
    }

    /**
     * Returns a function's columns under their names in the plan, and the column of the row after the last one of a shard, in which all others
     * are null.
     */
    private ArrayList named(ArrayList values) {
        Seq output = exchange.output();
        ArrayList columns = new ArrayList();
        for (int i = 0; i <= values.size(); i++) {
            Attribute name = (Attribute) output.apply(i);
            Expression value = i < values.size()
                ? new KnownNullable((Expression) values.get(i)) : new Literal(null, DataTypes.BinaryType);
            columns.add(Columns.named(value, name.name(), name.exprId()));
        }
        return columns;
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
}

/** Operators whose tasks hand the rows over to the store actor of their node themselves (HandOver.java): all but functions of the user's. */
class HandedOver {
    /** The text of HandOver.java, without its comment. */
    static volatile String code;

    /** Returns the rows of the operator whose tasks a node runs; null for any other node, and where a Python worker runs them. */
    static OperatorRows of(LogicalPlan node) {
        if (!isMapped(node)) {
            return null;
        }
        LogicalPlan below = (LogicalPlan) node.children().apply(0);
        while (below instanceof Project) {
            below = ((Project) below).child();
        }
        OperatorRows rows = OperatorRows.of(below);
        return rows == null || rows.areOfFunction() ? null : rows;
    }

    static boolean isMapped(LogicalPlan node) {
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

    /** Returns the rows that the tasks of a node emit. */
    static RDD emitted(SparkPlan node) {
        StatefulExchangeExec exchange = exchange((SparkPlan) node.children().apply(0));
        RDD rows = exchange.execute();
        Object[] references = new Object[] {
            exchange.facts().get("sockets").asText(), exchange.task(), exchange.batch(), exchange.shardsOfTasks(),
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

    private static StructType withoutLast(StructType type) {
        StructField[] fields = new StructField[type.length() - 1];
        for (int i = 0; i < fields.length; i++) {
            fields[i] = type.apply(i);
        }
        return new StructType(fields);
    }
}
