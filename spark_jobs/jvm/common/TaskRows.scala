package org.apache.spark.sql.statefleet

import org.apache.spark.{Dependency, NarrowDependency, Partition, SparkContext, TaskContext}
import org.apache.spark.rdd.RDD
import org.apache.spark.scheduler.TaskSchedulerImpl
import org.apache.spark.sql.catalyst.InternalRow

/**
 * A task of an operator.
 *
 * @param places The places of its shards among the partitions of the shuffle.
 * @param host The host that it prefers, which has its shards; None if it may run anywhere.
 */
case class ShardTask(places: Array[Int], host: Option[String])

object ShardTask {
  /** Returns a task for each shard. */
  def single(shards: Array[Int], run: OperatorRun): Seq[ShardTask] =
    shards.toSeq.zipWithIndex.map { case (shard, place) => ShardTask(Array(place), run.placeOf(shard).map(_.host)) }

  /**
   * Returns tasks that have several shards where there are more shards than cores: a task then has the commits of all
   * its shards under way at once, and waits for the object store once. A task has shards of one store actor only, and a
   * host has as many tasks as it has cores for.
   *
   * @param cores The cores of executors, by host.
   */
  def grouped(shards: Array[Int], run: OperatorRun, cores: Map[String, Int], context: SparkContext): Seq[ShardTask] = {
    val each = math.max(1, context.conf.getInt("spark.task.cpus", 1))
    // A shard whose host has no executor may run anywhere.
    def placeOf(place: Int) = run.placeOf(shards(place)).filter(at => cores.contains(at.host))
    val byHost = shards.indices.groupBy(placeOf(_).map(_.host))
    val tasks = byHost.toSeq.flatMap { case (host, ofHost) =>
      val slots = math.max(1, host.fold(context.defaultParallelism)(cores) / each)
      val byActor = ofHost.groupBy(placeOf(_).map(_.actor)).values
      byActor.flatMap { places =>
        val number = math.min(math.max(1, slots / byActor.size), places.size)
        (0 until number).map(first => ShardTask((first until places.size by number).map(places).toArray, host))
      }
    }
    tasks.sortBy(_.places.head)
  }
}

/**
 * The rows behind an exchange, by task. Spark asks for locations in the thread of its scheduler: they must not wait.
 *
 * @param ends The row after the last one of each partition of the shuffle; none if it is empty.
 */
class TaskRows(shuffled: RDD[InternalRow], @transient private val tasks: Seq[ShardTask], ends: Seq[InternalRow])
  extends RDD[InternalRow](shuffled.sparkContext, Nil) {
  import TaskRows._

  override protected def getDependencies: Seq[Dependency[_]] = Seq(new Shuffled(shuffled, tasks.map(_.places).toArray))

  override protected def getPartitions: Array[Partition] =
    tasks.zipWithIndex.map { case (task, index) =>
      new TaskPartition(index, task.places.map(shuffled.partitions(_)), task.places.toSeq.flatMap(ends.lift(_)).toArray)
    }.toArray

  override protected def getPreferredLocations(split: Partition): Seq[String] =
    // A stage waits for a location that it prefers, also for a host that is gone.
    tasks(split.index).host.filter(isAlive).toSeq

  private def isAlive(host: String): Boolean = sparkContext.taskScheduler match {
    case scheduler: TaskSchedulerImpl => scheduler.hasExecutorsAliveOnHost(host)
    case _ => true
  }

  override def compute(split: Partition, context: TaskContext): Iterator[InternalRow] = {
    val task = split.asInstanceOf[TaskPartition]
    task.shards.indices.iterator.flatMap { place =>
      shuffled.iterator(task.shards(place), context) ++ task.ends.lift(place)
    }
  }
}

object TaskRows {
  private class TaskPartition(val index: Int, val shards: Array[Partition], val ends: Array[InternalRow])
    extends Partition

  private class Shuffled(rows: RDD[InternalRow], places: Array[Array[Int]])
    extends NarrowDependency[InternalRow](rows) {
    override def getParents(partitionId: Int): Seq[Int] = places(partitionId).toSeq
  }
}
