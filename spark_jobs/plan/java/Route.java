package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.NamedExpression$;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;
import org.apache.spark.sql.streaming.OutputMode;
import scala.Option;
import scala.collection.JavaConverters;
import scala.collection.Seq;

/**
 * The facts of an operator, by the name of its route column (spark_jobs/plan/event_time.py). A plan has only the name, which Spark shows to
 * users. All plans of a JVM, in whatever session, are built by the Python that kept the facts in it.
 */
class Route {
    static final String PREFIX = "__route:";
    static final ObjectMapper JSON = new ObjectMapper();
    private static final ConcurrentHashMap FACTS = new ConcurrentHashMap();
    private static final ConcurrentHashMap TASKS = new ConcurrentHashMap();

    static void keep(String name, String facts, String task) {
        try {
            FACTS.put(name, JSON.readTree(facts));
            TASKS.put(name, task);
        } catch (java.io.IOException error) {
            throw new IllegalStateException("the facts of an operator are no JSON: " + facts, error);
        }
    }

    static String nameIn(Seq expressions) {
        if (expressions.size() == 1 && expressions.apply(0) instanceof Attribute) {
            String name = ((Attribute) expressions.apply(0)).name();
            return name.startsWith(PREFIX) ? name : null;
        }
        return null;
    }

    /** Returns the URI of the folder of an operator's state. */
    static String stateId(JsonNode facts) {
        return facts.get("uri").asText() + "/" + facts.get("state").asText();
    }

    /** Returns what the tasks of an operator send of it (store_actors/client/operator_task.py). */
    static String task(String name) {
        return (String) TASKS.get(name);
    }

    static JsonNode facts(String name) {
        JsonNode facts = (JsonNode) FACTS.get(name);
        if (facts == null) {
            throw new IllegalStateException("a route column without facts: " + name);
        }
        return facts;
    }
}

/** Output modes, in Spark's words in lower case. */
class Mode {
    static String of(OutputMode mode) {
        return mode.toString().toLowerCase();
    }

    /** Returns the mode of an operator: its own, or else that of the query which is being planned; null if there is none. */
    static String of(JsonNode facts, IncrementalExecution execution) {
        if (!facts.get("mode").isNull()) {
            return facts.get("mode").asText();
        }
        return execution == null ? null : of(execution.outputMode());
    }
}

class Lists {
    static Seq seq(List list) {
        return JavaConverters.asScalaBuffer(list).toList();
    }

    static ArrayList list(Seq seq) {
        return new ArrayList(JavaConverters.seqAsJavaList(seq));
    }
}

/** Columns of plans. */
class Columns {
    /** Returns the column of a name; null if there is none. */
    static Attribute in(Seq columns, String name) {
        for (Object column : Lists.list(columns)) {
            if (((Attribute) column).name().equals(name)) {
                return (Attribute) column;
            }
        }
        return null;
    }

    static Alias named(Expression value, String name) {
        return named(value, name, NamedExpression$.MODULE$.newExprId());
    }

    static Alias named(Expression value, String name, ExprId id) {
        Seq none = Lists.seq(new ArrayList());
        return new Alias(value, name, id, none, Option.apply(null), none);
    }
}
