package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
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
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.WholeStageCodegenEvaluatorFactory;
import org.apache.spark.sql.execution.exchange.ReusedExchangeExec;
import org.apache.spark.sql.execution.metric.SQLMetrics;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import scala.Option;
import scala.collection.Seq;

/**
 * An operator whose tasks hand the rows over to the store actor of their node themselves (HandOver.java), in place of Python workers on both
 * sides of the exchange.
 */
class HandedOver {
    /** Setting of the session that switches it on. */
    static final String SETTING = "spark.statefleet.handOver";

    /** The text of HandOver.java, without its comment. */
    static volatile String code;

    final RepartitionByExpression exchange;
    /** The facts of the operator, in the name of the exchange's column. */
    final JsonNode facts;
    /** The rows that Python's map side reads. */
    private final LogicalPlan rows;

    private HandedOver(RepartitionByExpression exchange, JsonNode facts, LogicalPlan rows) {
        this.exchange = exchange;
        this.facts = facts;
        this.rows = rows;
    }

    /** Returns the operator whose tasks a node runs; null for any other node, and where Python has to run. */
    static HandedOver of(LogicalPlan node, SparkSession session) {
        if (!isMapped(node) || !"true".equals(session.conf().get(SETTING, "false"))) {
            return null;
        }
        LogicalPlan below = projected((LogicalPlan) node.children().apply(0));
        if (!(below instanceof RepartitionByExpression)) {
            return null;
        }
        RepartitionByExpression exchange = (RepartitionByExpression) below;
        String route = Route.nameIn(exchange.partitionExpressions());
        LogicalPlan map = projected(exchange.child());
        if (route == null || !isMapped(map)) {
            return null;
        }
        JsonNode facts = Route.facts(route);
        return facts.get("sockets").isNull() ? null : new HandedOver(exchange, facts, (LogicalPlan) map.children().apply(0));
    }

    private static boolean isMapped(LogicalPlan node) {
        return node.getClass().getSimpleName().endsWith("MapInArrow");
    }

    /** Returns the plan below some projections. */
    private static LogicalPlan projected(LogicalPlan plan) {
        return plan instanceof Project ? projected(((Project) plan).child()) : plan;
    }

    /** Returns the rows with the route to one of a number of shards, as the last column, in place of the hash. */
    LogicalPlan routed(int shards) {
        Attribute route = (Attribute) exchange.partitionExpressions().apply(0);
        ArrayList columns = new ArrayList();
        Attribute hash = null;
        Seq output = rows.output();
        for (int i = 0; i < output.size(); i++) {
            Attribute column = (Attribute) output.apply(i);
            if (column.name().equals("__hash")) {
                hash = column;
            } else {
                columns.add(column);
            }
        }
        Literal number = new Literal(Integer.valueOf(shards), DataTypes.IntegerType);
        Literal routes = new Literal(
            new GenericArrayData(Shards.routes(shards)), DataTypes.createArrayType(DataTypes.IntegerType, false));
        Expression ofRow = new GetArrayItem(routes, new Pmod(hash, number), false);
        Seq none = Lists.seq(new ArrayList());
        columns.add(new Alias(ofRow, route.name(), route.exprId(), none, Option.apply(null), none));
        return new Project(Lists.seq(columns), rows);
    }

    /** Returns the rows that the tasks of a node emit. */
    static RDD emitted(SparkPlan node, Expression function) {
        StatefulExchangeExec exchange = exchange((SparkPlan) node.children().apply(0));
        RDD rows = exchange.execute();
        Object[] references = new Object[] {
            exchange.facts().get("sockets").asText(), pickled(((PythonUDF) function).func()), exchange.batch(), exchange.shardsOfTasks(),
            exchange.routes(), withoutLast(exchange.schema()), node.schema(), node.conf().sessionLocalTimeZone()
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
