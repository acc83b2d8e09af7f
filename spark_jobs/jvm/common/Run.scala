package org.apache.spark.sql.statefleet

import java.util.UUID
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.unsafe.hash.Murmur3_x86_32
import scala.collection.concurrent.TrieMap
import scala.collection.mutable

/** What is known of a run of a query, from its first batch to its end. */
class Run private (id: UUID) {
  private val operators = TrieMap.empty[String, OperatorRun]

  /** The newest batch that was reported as finished, and the newest that is known to be in the states' logs. */
  @volatile private var reported = -1L
  @volatile private var logged = -1L

  /** Returns what is known of an operator. */
  def operator(facts: Facts): OperatorRun = operators.getOrElseUpdate(facts.stateId, new OperatorRun(facts))

  /**
   * Reports a batch that Spark's commit log has: once, for all operators of the query.
   *
   * @param waitsForLog Whether to return only once the states' logs have the batch.
   */
  def report(execution: IncrementalExecution, waitsForLog: Boolean): Unit = {
    val batch = execution.currentBatchId
    if (batch != logged && (waitsForLog || batch != reported)) {
      val states = Run.statesOf(execution.executedPlan).groupBy(_.uri).map { case (uri, facts) =>
        uri -> facts.map(_.state)
      }
      Driver.ask[Done](
        "finished",
        Map("run_id" -> id.toString, "batch_id" -> batch, "at_once" -> waitsForLog, "states" -> states))
      reported = batch
      if (waitsForLog) logged = batch
    }
  }
}

object Run {
  private val runs = TrieMap.empty[UUID, Run]

  def of(execution: IncrementalExecution): Run = runs.getOrElseUpdate(execution.runId, new Run(execution.runId))

  /** Forgets a run, and tells the driver's Python that it has ended. */
  def end(id: UUID): Unit = {
    runs.remove(id)
    Driver.ask[Done]("ended", Map("run_id" -> id.toString))
  }

  private def statesOf(plan: SparkPlan): Seq[Facts] = {
    val here = plan match {
      case exchange: StatefulExchangeExec => Seq(exchange.facts)
      case _ => Nil
    }
    here ++ plan.children.flatMap(statesOf)
  }
}

/** The shards of a batch, as the coordinator has decided: how many, and the partition id of the first. */
case class Shards(shards: Int, firstPartition: Int)

object Shards {
  /** Spark's seed of hashes of rows. */
  private val Seed = 42

  /** Returns for each shard a route that Spark's partitioning puts there. */
  def routes(number: Int): Array[Int] = {
    val routes = Array.fill(number)(-1)
    Iterator.from(0).scanLeft(number) { (missing, route) =>
      val shard = Math.floorMod(Murmur3_x86_32.hashInt(route, Seed), number)
      if (routes(shard) >= 0) {
        missing
      } else {
        routes(shard) = route
        missing - 1
      }
    }.find(_ == 0)
    routes
  }
}

/** Where a shard is: a host, and the number of a store actor there. */
case class Place(host: String, actor: Int)

/** What is known of an operator in a run, and of its last batch. */
class OperatorRun(facts: Facts) {
  import OperatorRun._

  private val shards = mutable.Map.empty[Long, Shards]
  @volatile private var placedFor: Option[(Int, Executors)] = None
  @volatile private var places: Seq[Option[Place]] = Nil

  /** Rows and groups of the last batch that had rows. */
  @volatile private var last: Option[(Long, Long)] = None

  /**
   * Returns the shards of a batch: as answered at the end of the batch before, or else as the coordinator answers now.
   * They do not change within a batch.
   *
   * @param planned The number of shards that the query was built with.
   */
  def shardsOf(execution: IncrementalExecution, planned: Int): Shards = synchronized {
    val batch = execution.currentBatchId
    shards.getOrElseUpdate(
      batch, {
        val message = Map[String, Any](
          "operator" -> facts,
          "shards" -> planned,
          "active" -> Driver.activeQueries(execution.sparkSession))
        val answer = Driver.ask[Begun]("begin", Driver.batchFields(execution) ++ message)
        answer.refused.foreach(text => throw new IllegalStateException(text))
        shards.clear()
        Shards(answer.shards, answer.firstPartition)
      })
  }

  /** Has the shards of a batch placed before the first task of a run, and whenever the executors have changed. */
  def place(execution: IncrementalExecution, shards: Shards, executors: Executors): Unit = {
    // Shards of another layout are placed again.
    val wanted = Some((shards.firstPartition, executors))
    if (placedFor != wanted) {
      val message = Map("operator" -> facts, "executors" -> executors) ++ fields(shards)
      places = Driver.ask[Placed]("place", Driver.batchFields(execution) ++ message).found
      placedFor = wanted
    }
  }

  /** Returns where a shard is; None if it may run anywhere. */
  def placeOf(shard: Int): Option[Place] = places.lift(shard).flatten

  /**
   * Has a batch settled, and returns what its shards did.
   *
   * @param sent For each shard the numbers of rows that tasks sent it; None if a user's function got them.
   */
  def settle(execution: IncrementalExecution, of: Shards, sent: Option[Map[String, Seq[Long]]]): Settled = {
    val message = Map("operator" -> facts) ++ fields(of) ++ sent.map("sent" -> _)
    val settled = Driver.ask[Settled]("settle", Driver.batchFields(execution) ++ message)
    settled.refused.foreach(text => throw new IllegalStateException(text))
    places = settled.found
    synchronized {
      shards(execution.currentBatchId + 1) = settled.next
      shards.keys.filter(_ < execution.currentBatchId).toSeq.foreach(shards.remove)
    }
    // A batch without rows says nothing of the next one.
    if (settled.rowsRead > 0) last = Some((settled.rowsRead, settled.rowsUpdated))
    settled
  }

  /** True if the last batch had two rows a group; true if unknown, since hot keys are the worst case. */
  def repeats: Boolean = last.forall { case (rows, groups) => rows >= Repeated * groups }

  /** Whether the last batch had few rows. */
  def isSmall: Boolean = last.exists { case (rows, _) => rows <= FewRows }

  private def fields(shards: Shards): Map[String, Any] =
    Map("shards" -> shards.shards, "first_partition" -> shards.firstPartition)
}

object OperatorRun {
  /** Rows a group, in a whole batch, from which on a map task's rows are aggregated. */
  private val Repeated = 2

  /**
   * Rows up to which more map tasks than cores cost more than they balance: each takes as long as some ten thousand
   * rows.
   */
  private val FewRows = 10000L

  case class Begun(refused: Option[String], shards: Int, firstPartition: Int)

  /** places: for each shard a host and the number of a store actor, or null. */
  case class Placed(places: Seq[Option[(String, Int)]]) {
    def found: Seq[Option[Place]] = placesOf(places)
  }

  private def placesOf(places: Seq[Option[(String, Int)]]): Seq[Option[Place]] =
    places.map(_.map { case (host, actor) => Place(host, actor) })

  /**
   * What the shards did in a batch.
   *
   * @param refused Why the batch may not count; the other fields are empty then.
   * @param missing Shards that lack the batch, or whose rows no task counted.
   * @param next The next batch's shards.
   * @param dueMs When the operator has something to do without new rows.
   * @param custom Further metrics. (A number is of any class where Jackson does not know the type.)
   */
  case class Settled(
      refused: Option[String],
      missing: Seq[Int],
      places: Seq[Option[(String, Int)]],
      next: Shards,
      dueMs: Option[Number],
      custom: Map[String, Number],
      rowsTotal: Long,
      rowsUpdated: Long,
      rowsRemoved: Long,
      rowsLate: Long,
      memoryBytes: Long,
      updatesMs: Long,
      removalsMs: Long,
      commitMs: Long,
      instances: Long) {
    def found: Seq[Option[Place]] = placesOf(places)

    def rowsRead: Long = custom("rowsRead").longValue
  }
}

/** How many executors there are and were asked for (0 if not configured), and their cores by host. */
case class Executors(present: Int, asked: Int, cores: Map[String, Int])
