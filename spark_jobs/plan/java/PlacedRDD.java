package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.HashMap;
import org.apache.spark.Partition;
import org.apache.spark.Partitioner;
import org.apache.spark.SparkContext;
import org.apache.spark.rdd.CoalescedRDD;
import org.apache.spark.rdd.CoalescedRDDPartition;
import org.apache.spark.rdd.ParallelCollectionRDD;
import org.apache.spark.rdd.PartitionerAwareUnionRDD;
import org.apache.spark.rdd.RDD;
import org.apache.spark.scheduler.TaskScheduler;
import org.apache.spark.scheduler.TaskSchedulerImpl;
import scala.Option;
import scala.Some;
import scala.collection.Seq;
import scala.reflect.ClassTag;

/**
 * The rows of an exchange, whose tasks prefer the nodes that have their shards. It exists on the driver only. Spark calls it when it submits
 * the stage, in the thread of its scheduler: it must not wait.
 */
public class PlacedRDD extends PartitionerAwareUnionRDD {
    private final transient ClassTag tag;
    private final transient String state;
    private final transient int[] shards;

    PlacedRDD(SparkContext context, Seq both, ClassTag tag, String state, int[] shards) {
        super(context, both, tag);
        this.tag = tag;
        this.state = state;
        this.shards = shards;
    }

    public Seq getPreferredLocations(Partition split) {
        return preferred(context(), ShardPlaces.host(state, shards[split.index()]));
    }

    /** Returns the locations that a task prefers: the host, or none if it is null. */
    static Seq preferred(SparkContext context, String host) {
        ArrayList locations = new ArrayList();
        // A stage waits for a location that it prefers, also for a host that is gone.
        if (host != null && isAlive(context, host)) {
            locations.add(host);
        }
        return Lists.seq(locations);
    }

    private static boolean isAlive(SparkContext context, String host) {
        TaskScheduler scheduler = context.taskScheduler();
        return !(scheduler instanceof TaskSchedulerImpl) || ((TaskSchedulerImpl) scheduler).hasExecutorsAliveOnHost(host);
    }

    protected Object writeReplace() {
        return new PartitionerAwareUnionRDD(context(), rdds(), tag);
    }
}

/**
 * Groups shards into tasks where there are more shards than cores: a task then has the commits of all its shards under way at once, and
 * waits for the object store once. A group has shards of one store actor only, and a host has as many groups as it has cores for.
 */
class TaskGroups {
    private final ArrayList groups = new ArrayList();
    private final ArrayList hosts = new ArrayList();
    private final int number;

    TaskGroups(String state, int[] shards, JsonNode cores, SparkContext context) {
        number = shards.length;
        int each = Math.max(1, context.conf().getInt("spark.task.cpus", 1));
        int all = Math.max(1, context.defaultParallelism() / each);
        // A shard whose host has no executor may run anywhere.
        HashMap byHost = new HashMap();
        for (int i = 0; i < shards.length; i++) {
            String host = ShardPlaces.host(state, shards[i]);
            host = host != null && cores.has(host) ? host : null;
            Integer actor = Integer.valueOf(host == null ? 0 : ShardPlaces.actor(state, shards[i]));
            HashMap byActor = (HashMap) value(byHost, host, new HashMap());
            ((ArrayList) value(byActor, actor, new ArrayList())).add(Integer.valueOf(i));
        }
        for (Object host : byHost.keySet()) {
            int tasks = host == null ? all : Math.max(1, cores.get((String) host).asInt() / each);
            HashMap byActor = (HashMap) byHost.get(host);
            for (Object indices : byActor.values()) {
                add((String) host, (ArrayList) indices, Math.max(1, tasks / byActor.size()));
            }
        }
    }

    /** Returns the value of a key, which is this one if it has none yet. */
    private static Object value(HashMap values, Object key, Object made) {
        Object before = values.putIfAbsent(key, made);
        return before == null ? made : before;
    }

    private void add(String host, ArrayList indices, int tasks) {
        int number = Math.min(tasks, indices.size());
        for (int i = 0; i < number; i++) {
            int[] group = new int[(indices.size() - i + number - 1) / number];
            for (int j = 0; j < group.length; j++) {
                group[j] = ((Integer) indices.get(i + j * number)).intValue();
            }
            groups.add(group);
            hosts.add(host);
        }
    }

    /** Returns the shards of each task. */
    int[][] shards(int[] chosen) {
        int[][] shards = new int[groups.size()][];
        if (groups.size() == number) {
            for (int i = 0; i < number; i++) {
                shards[i] = new int[] {chosen[i]};
            }
            return shards;
        }
        for (int i = 0; i < shards.length; i++) {
            int[] indices = (int[]) groups.get(i);
            shards[i] = new int[indices.length];
            for (int j = 0; j < indices.length; j++) {
                shards[i][j] = chosen[indices[j]];
            }
        }
        return shards;
    }

    /** Returns the rows with a task for each group; the same rows if each group has one shard. */
    RDD of(RDD placed, ClassTag tag) {
        return groups.size() == number ? placed : new GroupedShardsRDD(placed, groups, hosts, tag);
    }
}

/** Several shards to a task, which prefers the host that has them. It exists on the driver only. */
public class GroupedShardsRDD extends CoalescedRDD {
    private final transient RDD placed;
    private final transient ArrayList groups;
    private final transient ArrayList hosts;
    private final transient ClassTag tag;

    GroupedShardsRDD(RDD placed, ArrayList groups, ArrayList hosts, ClassTag tag) {
        super(placed, groups.size(), (Option) Option.apply(null), tag);
        this.placed = placed;
        this.groups = groups;
        this.hosts = hosts;
        this.tag = tag;
    }

    public Partition[] getPartitions() {
        Partition[] partitions = new Partition[groups.size()];
        for (int i = 0; i < partitions.length; i++) {
            partitions[i] = new CoalescedRDDPartition(i, placed, (int[]) groups.get(i), (Option) Option.apply(hosts.get(i)));
        }
        return partitions;
    }

    public Seq getPreferredLocations(Partition split) {
        return PlacedRDD.preferred(context(), (String) hosts.get(split.index()));
    }

    protected Object writeReplace() {
        CoalescedRDD plain = new CoalescedRDD(placed, groups.size(), (Option) Option.apply(null), tag);
        // Computed here: an executor has only the dependencies that it is sent.
        plain.dependencies();
        return plain;
    }
}

/** One row for each partition, partitioned as the exchange is. */
public class MarkerRDD extends ParallelCollectionRDD {
    private final transient Partitioner like;
    private final transient Seq rows;
    private final transient ClassTag tag;

    MarkerRDD(SparkContext context, Seq rows, ClassTag tag, Partitioner like) {
        super(context, rows, rows.size(), new scala.collection.immutable.HashMap(), tag);
        this.rows = rows;
        this.tag = tag;
        this.like = like;
    }

    public Option partitioner() {
        return new Some(like);
    }

    protected Object writeReplace() {
        return new ParallelCollectionRDD(context(), rows, rows.size(), new scala.collection.immutable.HashMap(), tag);
    }
}
