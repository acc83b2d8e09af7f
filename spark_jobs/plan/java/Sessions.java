package statefleet.spark;

import java.util.ArrayList;
import java.util.function.Function;
import org.apache.spark.sql.ExperimentalMethods;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.streaming.StreamingQueryListener;
import scala.collection.Seq;

/**
 * The entry that Python calls.
 *
 * This folder is the exchange in front of a fleet's operator, as a stateful operator that Spark knows. Its files are joined and compiled when a
 * session is made ready, by the compiler that comes with Spark (Janino), so nothing is built or installed; it runs on the driver only. An
 * executor never gets a class of this package: an object that is sent to it is replaced by Spark's own (writeReplace).
 * Janino has neither lambdas nor usable generics, and compiles private methods in a way that serialisation does not find. So writeReplace is
 * protected, and types are raw.
 */
public class Sessions {
    /**
     * Makes a session plan the fleet's exchanges as StatefulExchangeExec; a second call has no effect.
     *
     * driver: a function of the driver's Python, from JSON to JSON. It answers whether a query may start on its states ("start"), how many
     * shards an operator has in a batch ("begin"), on which hosts ("place"), and at the end of a batch which shards lack it and what the
     * others did ("settle"). It also gets batches that the commit log has ("finished") and ended runs ("ended").
     * handOver: the code of tasks that hand rows over to store actors.
     */
    public void install(SparkSession session, Function driver, String handOver) {
        Driver.callback = driver;
        HandedOver.code = handOver;
        ExperimentalMethods methods = session.experimental();
        if (!holds(methods.extraStrategies(), ExchangeStrategy.class)) {
            session.streams().addListener(new RunEnds());
            methods.extraStrategies_$eq(with(methods.extraStrategies(), new ExchangeStrategy()));
        }
        if (!holds(methods.extraOptimizations(), UnmarkRule.class)) {
            methods.extraOptimizations_$eq(with(methods.extraOptimizations(), new UnmarkRule()));
            methods.extraOptimizations_$eq(with(methods.extraOptimizations(), new LateRowsRule()));
        }
        StartRule.install(session);
    }

    public boolean isInstalled(SparkSession session) {
        return holds(session.experimental().extraStrategies(), ExchangeStrategy.class);
    }

    /** Keeps the facts of an operator, and what its tasks send of it, both in JSON, under the name of its route column. */
    public void keepFacts(String name, String facts, String task) {
        Route.keep(name, facts, task);
    }

    /** Returns for each shard a number that Spark's hash partitioning puts there. */
    public int[] routes(int shards) {
        return Shards.routes(shards);
    }

    public String factsOf(String name) {
        return Route.facts(name).toString();
    }

    private static boolean holds(Seq seq, Class kind) {
        for (int i = 0; i < seq.size(); i++) {
            if (seq.apply(i).getClass() == kind) {
                return true;
            }
        }
        return false;
    }

    private static Seq with(Seq seq, Object added) {
        ArrayList all = Lists.list(seq);
        all.add(added);
        return Lists.seq(all);
    }
}

/**
 * Reports ended runs to the driver's Python. A listener of PySpark's would get the progress of each batch as well, which costs hundreds of
 * calls between the JVM and Python each time.
 */
class RunEnds extends StreamingQueryListener {
    public void onQueryStarted(StreamingQueryListener.QueryStartedEvent event) {}

    public void onQueryProgress(StreamingQueryListener.QueryProgressEvent event) {}

    public void onQueryTerminated(StreamingQueryListener.QueryTerminatedEvent event) {
        FinishedBatches.forget(event.runId().toString());
        Driver.ask(Route.JSON.createObjectNode().put("asked", "ended").put("run_id", event.runId().toString()));
    }
}
