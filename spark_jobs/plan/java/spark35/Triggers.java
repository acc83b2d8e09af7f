package statefleet.spark;

import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement;

class Triggers {
    /** Whether a query runs without batches that end before their results are seen. */
    static boolean isContinuous(WriteToStreamStatement query) {
        return query.isContinuousTrigger();
    }
}
