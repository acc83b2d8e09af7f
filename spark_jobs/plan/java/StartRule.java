package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.AnalysisException;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.analysis.Analyzer;
import org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker$;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.execution.streaming.StreamMetadata$;
import org.apache.spark.sql.execution.streaming.StreamMetadata;
import org.apache.spark.unsafe.Platform;
import scala.Option;
import scala.collection.JavaConverters;
import scala.collection.Seq;

/**
 * Checks a query when writeStream.start() has Spark analyse it. It refuses a query that would only fail in its first batch, with an error that
 * does not speak of exchanges. It stands before the rule that has Spark's own checks.
 */
class StartRule extends Rule {
    private final SparkSession session;

    StartRule(SparkSession session) {
        this.session = session;
    }

    /** Adds the rule to a session by reflection: Spark takes rules only when a session is created, which may be before this is compiled. */
    static void install(SparkSession session) {
        Analyzer analyzer = session.sessionState().analyzer();
        ArrayList rules = new ArrayList(JavaConverters.seqAsJavaList(analyzer.extendedResolutionRules()));
        for (Object rule : rules) {
            if (rule instanceof StartRule) {
                return;
            }
        }
        rules.add(0, new StartRule(session));
        try {
            java.lang.reflect.Field field = analyzer.getClass().getDeclaredField("extendedResolutionRules");
            field.setAccessible(true);
            field.set(analyzer, Lists.seq(rules));
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this session's analyzer takes no rules", error);
        }
    }

    public TreeNode apply(TreeNode plan) {
        if (plan instanceof WriteToStreamStatement) {
            WriteToStreamStatement query = (WriteToStreamStatement) plan;
            ArrayList operators = new ArrayList();
            JsonNode twice = find(query.inputQuery(), true, operators, new HashMap());
            if (twice != null) {
                refuse("two stateful operators of the query have the same name, and would share one state; nothing was started; give each "
                    + "a name of its own", twice);
            }
            if (!operators.isEmpty()) {
                check(query, operators);
                LogicalPlan filtered = new FilterPushdown(session).pushed(query.inputQuery());
                // An operator that is in the plan twice, under different filters, runs once for both.
                if (filtered != query.inputQuery() && find(filtered, true, new ArrayList(), new HashMap()) == null) {
                    return query.withNewChildren(Lists.seq(Arrays.asList(new Object[] {filtered})));
                }
            }
        }
        return plan;
    }

    /** An operator of the fleet, and whether no other operator stands above it. */
    private static class Operator {
        final String route;
        final JsonNode facts;
        final boolean isLast;

        Operator(String route, boolean isLast) {
            this.route = route;
            this.facts = Route.facts(route);
            this.isLast = isLast;
        }
    }

    /** Collects the operators of a plan. Returns the facts of an operator that would share its state with another, or null. */
    private static JsonNode find(LogicalPlan node, boolean isLast, ArrayList operators, HashMap seen) {
        if (node instanceof RepartitionByExpression) {
            String name = Route.nameIn(((RepartitionByExpression) node).partitionExpressions());
            if (name != null) {
                JsonNode facts = Route.facts(name);
                String state = Route.stateId(facts);
                LogicalPlan same = (LogicalPlan) seen.get(state);
                if (same == null) {
                    seen.put(state, node);
                    operators.add(new Operator(name, isLast));
                } else if (!same.sameResult(node)) {
                    // An operator that is in the plan twice, as in a self join, runs once.
                    return facts;
                }
                isLast = false;
            }
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            JsonNode twice = find((LogicalPlan) children.apply(i), isLast, operators, seen);
            if (twice != null) {
                return twice;
            }
        }
        return null;
    }

    private void check(WriteToStreamStatement query, ArrayList operators) {
        String mode = Mode.of(query.outputMode());
        if (Triggers.isContinuous(query)) {
            refuse("stateful operators run in batches, the fleet's as well as Spark's, and a continuous query has none; nothing was started; "
                + "leave the trigger out, or use processingTime or availableNow", ((Operator) operators.get(0)).facts);
        }
        for (Object each : operators) {
            Operator operator = (Operator) each;
            if (operator.isLast) {
                checkMode(operator.facts, mode);
            } else if (operator.facts.get("mode").isNull() && !mode.equals("append")) {
                refuse("the query runs in " + mode + " mode, in which this operator emits a row again when it changes, and the one above "
                    + "would count it twice; nothing was started; use append mode, or write its results to a sink and read them in a second "
                    + "query", operator.facts);
            }
        }
        if (session.sessionState().conf().isUnsupportedOperationCheckEnabled()) {
            checkAsSpark(query);
        }
        checkStates(query, mode, operators);
    }

    private static void checkMode(JsonNode facts, String mode) {
        if (facts.get("refused").has(mode)) {
            refuse(facts.get("refused").get(mode).asText(), facts);
        }
        boolean fits = false;
        for (JsonNode accepted : facts.get("modes")) {
            fits |= accepted.asText().equals(mode);
        }
        if (!fits) {
            refuse("the operator emits its results for output mode " + facts.get("modes") + " and the query runs in " + mode
                + " mode, which would take them for something else; nothing was started; give writeStream.outputMode(..) one that it "
                + "has, or leave outputMode out of fleet.stateful(..) if it was given", facts);
        }
    }

    /** Runs Spark's own check; its error is raised without the plan in its text. */
    private static void checkAsSpark(WriteToStreamStatement query) {
        try {
            UnsupportedOperationChecker$.MODULE$.checkForStreaming(query.inputQuery(), query.outputMode());
        } catch (Exception error) {
            if (error instanceof AnalysisException) {
                refuse(((AnalysisException) error).getSimpleMessage());
            }
            Platform.throwException(error);
        }
    }

    private void checkStates(WriteToStreamStatement query, String mode, ArrayList operators) {
        ObjectNode message = Route.JSON.createObjectNode();
        message.put("asked", "start");
        String folder = checkpoint(query);
        message.put("query_id", folder == null ? null : queryId(folder, query));
        message.put("has_checkpoint", folder != null);
        message.put("first_batch", folder == null ? Long.valueOf(0L) : firstBatch(folder, query));
        Driver.putActive(message, session);
        ArrayNode states = message.putArray("operators");
        for (Object each : operators) {
            JsonNode facts = ((Operator) each).facts;
            ObjectNode state = states.addObject();
            state.set("uri", facts.get("uri"));
            state.set("state", facts.get("state"));
            state.put("route", ((Operator) each).route);
            // Only where the operator has the query's mode: a mode of its own was compared when it was built.
            state.put("mode", facts.get("mode").isNull() ? mode : null);
        }
        Object refused = Driver.ask(message).get("refused");
        if (refused != null) {
            refuse((String) refused);
        }
    }

    /** Returns the folder of the query's checkpoint; null if each start has a folder of its own. */
    private String checkpoint(WriteToStreamStatement query) {
        if (query.userSpecifiedCheckpointLocation().isDefined()) {
            return (String) query.userSpecifiedCheckpointLocation().get();
        }
        boolean isNamed = query.userSpecifiedName().isDefined() && session.sessionState().conf().checkpointLocation().isDefined();
        return isNamed ? session.sessionState().conf().checkpointLocation().get() + "/" + query.userSpecifiedName().get() : null;
    }

    /** Returns the id of the query that a checkpoint belongs to; null if the query will be new. */
    private static String queryId(String folder, WriteToStreamStatement query) {
        Option found = StreamMetadata$.MODULE$.read(new Path(new Path(folder), "metadata"), query.hadoopConf());
        return found.isDefined() ? ((StreamMetadata) found.get()).id() : null;
    }

    /** Returns the number of the first batch that a query runs: the one after the last in its commit log; null if that cannot be listed. */
    private static Long firstBatch(String folder, WriteToStreamStatement query) {
        long first = 0;
        try {
            Path commits = new Path(folder, "commits");
            FileSystem files = commits.getFileSystem(query.hadoopConf());
            if (files.exists(commits)) {
                for (FileStatus file : files.listStatus(commits)) {
                    String name = file.getPath().getName();
                    first = name.matches("[0-9]+") ? Math.max(first, Long.parseLong(name) + 1) : first;
                }
            }
        } catch (java.io.IOException error) {
            return null;
        }
        return Long.valueOf(first);
    }

    private static void refuse(String text, JsonNode facts) {
        refuse(text + " [state=`" + facts.get("state").asText() + "`]");
    }

    private static void refuse(String text) {
        Option none = Option.apply(null);
        Platform.throwException(new AnalysisException(
            text, none, none, none, none, new scala.collection.immutable.HashMap(), new org.apache.spark.QueryContext[0]));
    }
}
