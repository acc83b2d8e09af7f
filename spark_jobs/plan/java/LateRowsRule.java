package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import scala.collection.Seq;

/**
 * Spark prunes the column of a watermark where nothing above its own operator reads it, and then no row is late for that operator. An
 * operator of the fleet is sent such a column all the same; here it becomes null, which is never late.
 */
class LateRowsRule extends Rule {
    public TreeNode apply(TreeNode plan) {
        LogicalPlan root = (LogicalPlan) plan;
        // From the top down: a column that an operator gets may be all that reads the column of the operator below it.
        java.util.LinkedHashMap late = new java.util.LinkedHashMap();
        ArrayList tasks = tasks(root, null);
        for (int i = 0; i < tasks.size(); i++) {
            late.put(((Task) tasks.get(i)).state, ((Task) tasks.get(i)).late);
        }
        for (Object state : late.keySet()) {
            java.util.Iterator names = ((JsonNode) late.get(state)).fieldNames();
            while (names.hasNext()) {
                root = pruned(root, (String) state, (String) names.next());
            }
        }
        return root;
    }

    /** An operator's exchange, and the node above it that emits its rows. */
    private static class Task {
        final String state;
        final JsonNode late;
        final LogicalPlan exchange;
        final LogicalPlan emitting;

        Task(JsonNode facts, LogicalPlan exchange, LogicalPlan emitting) {
            this.state = facts.get("state").asText();
            this.late = facts.get("late_columns");
            this.exchange = exchange;
            this.emitting = emitting;
        }
    }

    private static boolean isMapped(LogicalPlan node) {
        return node.getClass().getSimpleName().endsWith("MapInArrow");
    }

    private static String routeOf(LogicalPlan node) {
        return node instanceof RepartitionByExpression
            ? Route.nameIn(((RepartitionByExpression) node).partitionExpressions()) : null;
    }

    /** Returns the fleet's operators, each before those below it; only those of a state's name, unless it is null. */
    private static ArrayList tasks(LogicalPlan root, String state) {
        ArrayList tasks = new ArrayList();
        find(root, null, state, tasks);
        return tasks;
    }

    private static void find(LogicalPlan node, LogicalPlan emitting, String state, ArrayList tasks) {
        String route = routeOf(node);
        if (route != null && emitting != null) {
            Task task = new Task(Route.facts(route), node, emitting);
            if (state == null || state.equals(task.state)) {
                tasks.add(task);
            }
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            find((LogicalPlan) children.apply(i), isMapped(node) ? node : emitting, state, tasks);
        }
    }

    /** Nulls the column in each exchange of an operator, or in none: one that is in the plan twice, as in a self join, runs once. */
    private static LogicalPlan pruned(LogicalPlan root, String state, String column) {
        ArrayList tasks = tasks(root, state);
        for (int i = 0; i < tasks.size(); i++) {
            Task task = (Task) tasks.get(i);
            if (isRead(root, task.emitting, task.late.get(column))) {
                return root;
            }
        }
        for (int i = 0; i < tasks.size(); i++) {
            root = nulled(root, ((Task) tasks.get(i)).exchange, column, false);
        }
        return root;
    }

    private static boolean isRead(LogicalPlan root, LogicalPlan emitting, JsonNode names) {
        Seq emitted = emitting.output();
        for (int i = 0; i < emitted.size(); i++) {
            Attribute column = (Attribute) emitted.apply(i);
            for (JsonNode name : names) {
                if (name.asText().equals(column.name()) && (root.outputSet().contains(column) || isRead(root, emitting, column))) {
                    return true;
                }
            }
        }
        return false;
    }

    /** Whether a node that is not below the operator reads one of its columns. */
    private static boolean isRead(LogicalPlan node, LogicalPlan emitting, Attribute column) {
        if (node == emitting) {
            return false;
        }
        if (node.references().contains(column)) {
            return true;
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            if (isRead((LogicalPlan) children.apply(i), emitting, column)) {
                return true;
            }
        }
        return false;
    }

    /** Returns the plan with nulls in a column of the rows that an exchange gets. */
    private static LogicalPlan nulled(LogicalPlan node, LogicalPlan exchange, String column, boolean isBelow) {
        Seq children = node.children();
        ArrayList changed = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < children.size(); i++) {
            LogicalPlan child = (LogicalPlan) children.apply(i);
            LogicalPlan after = isBelow && isMapped(node)
                ? (child instanceof Project ? without((Project) child, column) : child)
                : nulled(child, exchange, column, isBelow || node == exchange);
            differs |= after != child;
            changed.add(after);
        }
        return differs ? (LogicalPlan) node.withNewChildren(Lists.seq(changed)) : node;
    }

    /** Returns the rows with a column that is computed for them as nulls. */
    private static LogicalPlan without(Project rows, String name) {
        ArrayList columns = new ArrayList();
        Seq list = rows.projectList();
        boolean differs = false;
        for (int i = 0; i < list.size(); i++) {
            NamedExpression column = (NamedExpression) list.apply(i);
            boolean isLate = column.name().equals(name) && column instanceof Alias && !(((Alias) column).child() instanceof Literal);
            columns.add(!isLate ? column : (Object) Columns.named(
                new Literal(null, ((Alias) column).child().dataType()), name, column.exprId()));
            differs |= isLate;
        }
        return differs ? new Project(Lists.seq(columns), rows.child()) : rows;
    }
}
