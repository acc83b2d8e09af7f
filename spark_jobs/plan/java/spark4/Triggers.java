package statefleet.spark;

import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement;
import org.apache.spark.sql.execution.streaming.ContinuousTrigger;
import org.apache.spark.sql.execution.streaming.RealTimeTrigger;

class Triggers {
    /** Whether a query runs without batches that end before their results are seen. */
    static boolean isContinuous(WriteToStreamStatement query) {
        return query.trigger() instanceof ContinuousTrigger || query.trigger() instanceof RealTimeTrigger;
    }
}
