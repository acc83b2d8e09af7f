package statefleet.spark;

import java.util.ArrayList;
import java.util.HashMap;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.CurrentBatchTimestamp;
import org.apache.spark.sql.catalyst.expressions.CurrentDate;
import org.apache.spark.sql.catalyst.expressions.CurrentTimestampLike;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.LocalTimestamp;
import org.apache.spark.sql.catalyst.expressions.PythonUDF;
import org.apache.spark.sql.catalyst.expressions.SubqueryExpression$;
import org.apache.spark.sql.catalyst.plans.logical.BaseEvalPython;
import org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.ReturnAnswer;
import org.apache.spark.sql.catalyst.trees.TreeNodeTag;
import scala.Option;
import scala.Some;

/**
 * Filters that Spark moves below an operator, because of what follows it, and below the operator's watermark where it can.
 *
 * Only rows that pass them move the watermark, and so they decide which rows are late; and rows that do not pass them take no room in the
 * state. Spark's optimizer moves a filter on the groups of an aggregation, or on a side of a join, through the operator; it cannot move a
 * filter through an operator of the fleet. So it optimises the query with Spark's own operators in their places: once to find which filters it puts
 * below a watermark, and once for those that reach the plan that an operator is built of. There they are put in the query. They only leave out rows
 * that add to no result, and stay where they were, too.
 */
class FilterPushdown {
    /** On the results of an operator: Spark's own operator, as it was analysed. Python sets it. */
    static final TreeNodeTag ANALYSED = new TreeNodeTag("statefleet.analysed");
    /** On a node that no filter is moved through: the number of the input below it. */
    private static final TreeNodeTag INPUT = new TreeNodeTag("statefleet.input");

    private final SparkSession session;
    /** Conditions by watermark. */
    private final HashMap conditions = new HashMap();
    /** Conditions by the number of an input. */
    private final HashMap ofInputs = new HashMap();
    /** The nodes of the query by identity, and the numbers of those that are an operator's input. */
    private final java.util.IdentityHashMap nodes = new java.util.IdentityHashMap();
    private final java.util.IdentityHashMap inputs = new java.util.IdentityHashMap();
    private boolean hasOperator;

    FilterPushdown(SparkSession session) {
        this.session = session;
    }

    /** Returns the query with these filters; the query itself if there are none. */
    LogicalPlan pushed(LogicalPlan query) {
        LogicalPlan own = asSparks(query);
        if (!hasOperator) {
            return query;
        }
        collect((LogicalPlan) session.sessionState().optimizer().execute(own));
        remember(query);
        // A filter that has reached an operator's input moves on through the operators below that input.
        boolean differs = true;
        for (int i = 0; differs && i <= inputs.size(); i++) {
            LogicalPlan moved = withInputs(query, false);
            HashMap found = new HashMap();
            collectAtInputs((LogicalPlan) session.sessionState().optimizer().execute(moved), found);
            differs = false;
            for (Object input : found.keySet()) {
                differs |= add(input, (Expression) found.get(input));
            }
        }
        return filtered(query, false);
    }

    /** Adds new parts to the condition of an input; returns whether there were any. Spark drops filters that already hold below. */
    private boolean add(Object input, Expression found) {
        Expression condition = (Expression) ofInputs.get(input);
        ArrayList known = new ArrayList();
        ArrayList parts = new ArrayList();
        if (condition != null) {
            split(condition, known);
        }
        if (found != null) {
            split(found, parts);
        }
        boolean differs = false;
        for (Object each : parts) {
            boolean isNew = true;
            for (Object other : known) {
                isNew &= !((Expression) other).semanticEquals((Expression) each);
            }
            if (isNew) {
                condition = condition == null ? (Expression) each : new And(condition, (Expression) each);
                differs = true;
            }
        }
        ofInputs.put(input, condition);
        return differs;
    }

    private void remember(LogicalPlan node) {
        nodes.put(node, Boolean.TRUE);
        for (int i = 0; i < node.children().size(); i++) {
            remember((LogicalPlan) node.children().apply(i));
        }
    }

    /** Returns the query with Spark's own operators, closed to filters at each input: the nodes that both plans have. */
    private LogicalPlan withInputs(LogicalPlan node, boolean isInOperator) {
        Option analysed = node.getTagValue(ANALYSED);
        if (isInOperator && node.isStreaming() && nodes.containsKey(node)) {
            if (!inputs.containsKey(node)) {
                inputs.put(node, Integer.valueOf(inputs.size()));
            }
            LogicalPlan input = new ReturnAnswer(filtered(withInputs(node, false), ofInputs.get(inputs.get(node))));
            input.setTagValue(INPUT, inputs.get(node));
            return input;
        }
        if (analysed.isDefined()) {
            return named(node, withInputs((LogicalPlan) analysed.get(), true));
        }
        ArrayList children = new ArrayList();
        for (int i = 0; i < node.children().size(); i++) {
            children.add(withInputs((LogicalPlan) node.children().apply(i), isInOperator));
        }
        return ofBatch(children.isEmpty() ? node : (LogicalPlan) node.withNewChildren(Lists.seq(children)));
    }

    private LogicalPlan asSparks(LogicalPlan node) {
        Option analysed = node.getTagValue(ANALYSED);
        if (analysed.isDefined()) {
            hasOperator = true;
            return named(node, asSparks((LogicalPlan) analysed.get()));
        }
        ArrayList children = new ArrayList();
        boolean isLowest = node instanceof EventTimeWatermark;
        for (int i = 0; i < node.children().size(); i++) {
            boolean before = hasOperator;
            hasOperator = false;
            LogicalPlan child = asSparks((LogicalPlan) node.children().apply(i));
            isLowest &= !hasOperator;
            hasOperator |= before;
            children.add(child);
        }
        if (isLowest) {
            // No filter is moved through a ReturnAnswer, so filters stay where collect() looks for them.
            children.set(0, new ReturnAnswer((LogicalPlan) children.get(0)));
        }
        return ofBatch(children.isEmpty() ? node : (LogicalPlan) node.withNewChildren(Lists.seq(children)));
    }

    /** Returns Spark's own operator with the column ids of the fleet's. */
    private static LogicalPlan named(LogicalPlan results, LogicalPlan own) {
        ArrayList columns = new ArrayList();
        for (int i = 0; i < results.output().size(); i++) {
            Attribute column = (Attribute) results.output().apply(i);
            Attribute ownColumn = (Attribute) own.output().apply(i);
            // A self join gives the columns of one side other ids.
            columns.add(column.exprId().equals(ownColumn.exprId())
                ? (Object) ownColumn
                : (Object) Columns.named(ownColumn, column.name(), column.exprId()));
        }
        return new Project(Lists.seq(columns), own);
    }

    private static LogicalPlan ofBatch(LogicalPlan node) {
        return (LogicalPlan) node.mapExpressions(new scala.runtime.AbstractFunction1() {
            public Object apply(Object expression) {
                return ofBatch((Expression) expression);
            }
        });
    }

    /** Returns the expression with the time of a batch as Spark has it in a running query: no constant, so it moves no filter. */
    private static Expression ofBatch(Expression expression) {
        if (expression instanceof CurrentTimestampLike || expression instanceof CurrentDate || expression instanceof LocalTimestamp) {
            return new CurrentBatchTimestamp(0L, expression.dataType(), new Some("UTC"));
        }
        ArrayList children = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < expression.children().size(); i++) {
            Expression child = (Expression) expression.children().apply(i);
            Expression after = ofBatch(child);
            differs |= after != child;
            children.add(after);
        }
        return differs ? (Expression) expression.withNewChildren(Lists.seq(children)) : expression;
    }

    /** Remembers the filters below each watermark of an optimised plan, down to the node that closes it to filters. */
    private void collect(LogicalPlan node) {
        if (node instanceof EventTimeWatermark) {
            Filtered below = new Filtered(((EventTimeWatermark) node).child());
            if (below.rows instanceof ReturnAnswer) {
                remember(conditions, key((EventTimeWatermark) node), below.condition());
            }
        }
        for (int i = 0; i < node.children().size(); i++) {
            collect((LogicalPlan) node.children().apply(i));
        }
    }

    /** Remembers the filters of each input of an operator. */
    private static void collectAtInputs(LogicalPlan node, HashMap conditions) {
        Filtered below = new Filtered(node);
        Option input = below.rows.getTagValue(INPUT);
        if (below.rows instanceof ReturnAnswer && input.isDefined()) {
            remember(conditions, input.get(), below.condition());
        }
        for (int i = 0; i < below.rows.children().size(); i++) {
            collectAtInputs((LogicalPlan) below.rows.children().apply(i), conditions);
        }
    }

    /** Rows in an optimised plan, and the filters above them. */
    private static class Filtered {
        final LogicalPlan rows;
        private final ArrayList parts = new ArrayList();
        private final HashMap functions = new HashMap();

        Filtered(LogicalPlan top) {
            LogicalPlan below = top;
            while (below instanceof Filter || below instanceof Project || below instanceof BaseEvalPython) {
                if (below instanceof Filter) {
                    split(((Filter) below).condition(), parts);
                } else if (below instanceof BaseEvalPython) {
                    BaseEvalPython calls = (BaseEvalPython) below;
                    for (int i = 0; i < calls.udfs().size(); i++) {
                        functions.put(((Attribute) calls.resultAttrs().apply(i)).exprId(), calls.udfs().apply(i));
                    }
                }
                below = (LogicalPlan) below.children().apply(0);
            }
            rows = below;
        }

        /** Returns the part of the filters that reads only columns of the rows; null if there is none. */
        Expression condition() {
            Expression condition = null;
            for (Object each : parts) {
                Expression part = called((Expression) each, functions);
                if (part.references().subsetOf(rows.outputSet()) && !SubqueryExpression$.MODULE$.hasSubquery(part)) {
                    condition = condition == null ? part : new And(condition, part);
                }
            }
            return condition;
        }
    }

    static void split(Expression condition, ArrayList parts) {
        if (condition instanceof And) {
            split(((And) condition).left(), parts);
            split(((And) condition).right(), parts);
        } else {
            parts.add(condition);
        }
    }

    /** Returns the expression with each result of a Python function replaced by the call. */
    static Expression called(Expression expression, HashMap functions) {
        if (expression instanceof Attribute) {
            Object function = functions.get(((Attribute) expression).exprId());
            return function == null ? expression : called((PythonUDF) function, functions);
        }
        ArrayList children = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < expression.children().size(); i++) {
            Expression child = (Expression) expression.children().apply(i);
            Expression after = called(child, functions);
            differs |= after != child;
            children.add(after);
        }
        return differs ? (Expression) expression.withNewChildren(Lists.seq(children)) : expression;
    }

    /** A stream that is read in several places has filters of its own in each: then no row may be left out for all. */
    private static void remember(HashMap conditions, Object key, Expression condition) {
        if (!conditions.containsKey(key)) {
            conditions.put(key, condition);
        } else {
            Expression other = (Expression) conditions.get(key);
            if (other == null || condition == null || !other.semanticEquals(condition)) {
                conditions.put(key, null);
            }
        }
    }

    /** isInOperator: whether the input of an operator is still below; the same rows may be read by another node, unfiltered. */
    private LogicalPlan filtered(LogicalPlan node, boolean isInOperator) {
        boolean isInput = isInOperator && inputs.containsKey(node);
        boolean isInOperatorBelow = isInOperator && !isInput || node.getTagValue(ANALYSED).isDefined();
        ArrayList children = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < node.children().size(); i++) {
            LogicalPlan child = (LogicalPlan) node.children().apply(i);
            LogicalPlan after = filtered(child, isInOperatorBelow);
            if (node instanceof EventTimeWatermark) {
                after = filtered(after, conditions.get(key((EventTimeWatermark) node)));
            }
            differs |= after != child;
            children.add(after);
        }
        LogicalPlan rows = differs ? (LogicalPlan) node.withNewChildren(Lists.seq(children)) : node;
        return isInput ? filtered(rows, ofInputs.get(inputs.get(node))) : rows;
    }

    private static LogicalPlan filtered(LogicalPlan rows, Object condition) {
        boolean fits = condition != null && ((Expression) condition).references().subsetOf(rows.outputSet());
        return fits ? new Filter((Expression) condition, rows) : rows;
    }

    private static String key(EventTimeWatermark watermark) {
        return watermark.eventTime().exprId() + " " + watermark.delay();
    }
}
