package statefleet.spark;

import java.util.ArrayList;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.spark.sql.catalyst.plans.physical.Partitioning;
import org.apache.spark.sql.catalyst.rules.RuleId;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec;
import org.apache.spark.sql.execution.exchange.ShuffleOrigin;
import org.apache.spark.sql.execution.streaming.operators.stateful.StateStoreWriter;
import org.apache.spark.sql.execution.streaming.operators.stateful.StatefulOpStateStoreCheckpointInfo;
import org.apache.spark.sql.execution.streaming.operators.stateful.StatefulOperatorStateInfo;
import org.apache.spark.util.CollectionAccumulator;
import scala.Function1;
import scala.Option;
import scala.PartialFunction;
import scala.collection.immutable.Seq;
import scala.runtime.AbstractFunction1;

/**
 * The methods that Scala would generate in a class with Spark 4's traits of stateful operators, and those by which Spark 4 keeps schemas and
 * checkpoint ids of its own stores: the fleet's operator has none of these.
 */
public abstract class VersionedExchange extends ShuffleExchangeExec implements StateStoreWriter {
    /** End of the name of the class that makes the progress of a trigger. */
    static final String PROGRESS = "ProgressContext";

    /** Method of Spark's that compares the operators of a plan with those in its checkpoint. */
    static final String OPERATOR_CHECK = "checkOperatorValidWithMetadata";

    private transient scala.collection.immutable.Map noMetrics;

    protected VersionedExchange(Partitioning partitioning, SparkPlan child, ShuffleOrigin origin, Option advisory) {
        super(partitioning, child, origin, advisory);
    }

    public void org$apache$spark$sql$execution$streaming$operators$stateful$StateStoreWriter$$super$resetMetrics() {
        super.resetMetrics();
    }

    public scala.collection.immutable.Map pythonMetrics() {
        return noMetrics;
    }

    public void org$apache$spark$sql$execution$python$PythonSQLMetrics$_setter_$pythonMetrics_$eq(
        scala.collection.immutable.Map metrics) {
        noMetrics = metrics;
    }

    /**
     * Spark's rule that writes schemas and names of operators into the checkpoint passes over this one, as does its check of them: the fleet
     * keeps and compares its own, and a checkpoint of Spark 3.5, or of a branch, has none.
     */
    public TreeNode transformDownWithPruning(final Function1 condition, final RuleId ruleId, final PartialFunction rule) {
        if (!rule.getClass().getName().contains("StateSchemaAndOperatorMetadataRule")) {
            return super.transformDownWithPruning(condition, ruleId, rule);
        }
        return mapChildren(new AbstractFunction1() {
            public Object apply(Object child) {
                return ((TreeNode) child).transformDownWithPruning(condition, ruleId, rule);
            }
        });
    }

    public scala.collection.immutable.List validateAndMaybeEvolveStateSchema(Configuration conf, long batchId, int version) {
        return (scala.collection.immutable.List) Lists.seq(new ArrayList());
    }

    /** None: Spark counts the commits of these stores when a sink is a function. */
    public Seq stateStoreNames() {
        return Lists.seq(new ArrayList());
    }

    public void org$apache$spark$sql$execution$streaming$operators$stateful$StateStoreWriter$_setter_$stateStoreNames_$eq(Seq names) {}

    public CollectionAccumulator checkpointInfoAccumulator() {
        return null;
    }

    public void org$apache$spark$sql$execution$streaming$operators$stateful$StateStoreWriter$_setter_$checkpointInfoAccumulator_$eq(
        CollectionAccumulator accumulator) {}

    public StatefulOpStateStoreCheckpointInfo[] getStateStoreCheckpointInfo() {
        return new StatefulOpStateStoreCheckpointInfo[0];
    }

    static StatefulOperatorStateInfo operatorInfo(String checkpoint, UUID runId, long id, long batchId, int shards) {
        Option none = Option.apply(null);
        return new StatefulOperatorStateInfo(checkpoint, runId, id, batchId, shards, none, none);
    }
}
