package statefleet.spark;

import java.util.UUID;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.catalyst.plans.physical.Partitioning;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec;
import org.apache.spark.sql.execution.exchange.ShuffleOrigin;
import org.apache.spark.sql.execution.streaming.StateStoreWriter;
import org.apache.spark.sql.execution.streaming.StatefulOperatorStateInfo;
import scala.Option;

/** The methods that Scala would generate in a class with Spark 3.5's traits of stateful operators. */
public abstract class VersionedExchange extends ShuffleExchangeExec implements StateStoreWriter {
    /** End of the name of the class that makes the progress of a trigger. */
    static final String PROGRESS = "ProgressReporter";

    /** Method of Spark's that compares the operators of a plan with those in its checkpoint; Spark 3.5 has none. */
    static final String OPERATOR_CHECK = null;

    private transient scala.collection.immutable.Map noMetrics;

    protected VersionedExchange(Partitioning partitioning, SparkPlan child, ShuffleOrigin origin, Option advisory) {
        super(partitioning, child, origin, advisory);
    }

    public SparkContext org$apache$spark$sql$execution$streaming$StateStoreWriter$$super$sparkContext() {
        return sparkContext();
    }

    public scala.collection.immutable.Map pythonMetrics() {
        return noMetrics;
    }

    public void org$apache$spark$sql$execution$python$PythonSQLMetrics$_setter_$pythonMetrics_$eq(
        scala.collection.immutable.Map metrics) {
        noMetrics = metrics;
    }

    static StatefulOperatorStateInfo operatorInfo(String checkpoint, UUID runId, long id, long batchId, int shards) {
        return new StatefulOperatorStateInfo(checkpoint, runId, id, batchId, shards);
    }
}
