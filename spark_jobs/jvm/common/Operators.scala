package org.apache.spark.sql.statefleet

import java.util.Locale
import java.util.function.{Function => JavaFunction}
import org.apache.spark.{SparkEnv, TaskContext}
import org.apache.spark.sql.Row
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.analysis.MultiInstanceRelation
import org.apache.spark.sql.catalyst.expressions.{Alias, Attribute, AttributeSet, NamedExpression}
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project, UnaryNode}
import org.apache.spark.sql.catalyst.plans.physical.HashPartitioning
import org.apache.spark.sql.catalyst.types.DataTypeUtils.toAttributes
import org.apache.spark.sql.execution.{LogicalRDD, SparkPlan, SparkStrategy, SQLExecution}
import org.apache.spark.sql.streaming.{OutputMode, StreamingQueryListener}
import org.apache.spark.sql.types.StructType
import scala.annotation.tailrec
import scala.jdk.CollectionConverters._

/** What Python calls. */
object Sessions {
  /**
   * Makes a session plan the fleet's operators, unless it does so.
   *
   * @param driver A function of the driver's Python, from JSON to JSON (spark_jobs/driver/driver_calls.py).
   */
  def install(session: SparkSession, driver: JavaFunction[String, String]): Unit = synchronized {
    Driver.callback = driver
    Places.serve()
    if (!isInstalled(session)) {
      val methods = session.experimental
      StartRule.install(session)
      methods.extraOptimizations ++= Seq(UnmarkRule, LateRowsRule)
      session.streams.addListener(RunEvents)
      methods.extraStrategies :+= ExchangeStrategy
    }
  }

  /** Has the driver's Python told of what happens to queries, or not. */
  def follow(isFollowed: Boolean): Unit = RunEvents.isFollowed = isFollowed

  /**
   * Raises an error unless every core of the session's executors can connect to all store actors that its shards may
   * be at; returns where Python workers find these, in JSON.
   *
   * @param sockets How the paths of the fleet's sockets begin.
   */
  def checkReach(session: SparkSession, uri: String, sockets: String): String = {
    val context = session.sparkContext
    val cores = Executors.coresByHost(context)
    val places = Driver.ask[Array[Place]]("reach", Map("uri" -> uri, "cores" -> cores)).filter(_ != null)
    if (places.isEmpty) throw new IllegalStateException("no store actor is there; see the driver's log for why")
    val tasks = math.max(1, cores.values.sum)
    context.parallelize(0 until tasks, tasks).foreach { _ =>
      val host = SparkEnv.get.blockManager.blockManagerId.host
      places.foreach(StoreActorAddress.holder(sockets, _, host).connected(TaskContext.get()).close())
    }
    Driver.json.writeValueAsString(places.map(StoreActorAddress(sockets, _).fields))
  }

  def isInstalled(session: SparkSession): Boolean = session.experimental.extraStrategies.contains(ExchangeStrategy)

  /**
   * Returns the rows of an operator's inputs, each by its shard.
   *
   * @param inputs Rows with the columns that a shard reads, and their hash in a column `__hash`.
   * @param columns The columns behind it; the last one is the route.
   * @param shards The number of shards that the query is built with.
   * @param facts What the operator is, in JSON.
   */
  def exchanged(inputs: java.util.List[Dataset[Row]], columns: StructType, shards: Int, facts: String): Dataset[Row] = {
    val rows = inputs.asScala.toSeq
    val read = Driver.json.readValue(facts, classOf[Facts])
    Dataset.ofRows(
      rows.head.sparkSession,
      StatefulExchange(rows.map(_.logicalPlan), toAttributes(columns), shards, read))
  }

  /**
   * Returns the rows that an operator's tasks emit.
   *
   * @param operator The operator as store actors get it, in JSON.
   */
  def handedOver(rows: Dataset[Row], columns: StructType, operator: String): Dataset[Row] =
    Dataset.ofRows(rows.sparkSession, HandedOver(rows.logicalPlan, toAttributes(columns), operator))

  /** Returns a time as `withWatermark` takes it, in milliseconds. */
  def milliseconds(time: String): Long = IdleSources.milliseconds(time)

  /** Returns the aggregation with DISTINCT that a frame is; null for any other frame. */
  def distinctAggregation(frame: Dataset[Row]): DistinctAggregation = DistinctAggregation.of(frame)

  /** Returns results with a column of their order. */
  def ordered(results: Dataset[Row], column: String): Dataset[Row] =
    Dataset.ofRows(results.sparkSession, ResultOrder.below(results.logicalPlan, column))

  /** Returns the facts of an operator whose exchange a node is, in JSON; null for any other node. */
  def factsOf(node: LogicalPlan): String = node match {
    case exchange: StatefulExchange => Driver.json.writeValueAsString(exchange.facts)
    case _ => null
  }

  def routes(shards: Int): Array[Int] = Shards.routes(shards)

  /** Returns rows of a state store, a partition in each task. */
  def stateRows(session: SparkSession, partitions: Int, rows: StateRows): Dataset[Row] = {
    val none = session.sparkContext.parallelize(Seq.empty[InternalRow], partitions)
    session.internalCreateDataFrame(none.mapPartitionsWithIndexInternal(rows), rows.rows)
  }
}

/**
 * Reports ended runs to the driver's Python, and, if queries are followed, all that Spark tells listeners, in a call each.
 * A listener of PySpark's would cost hundreds of calls between the JVM and Python for the progress of each batch.
 */
private object RunEvents extends StreamingQueryListener {
  @volatile var isFollowed = false

  private def tell(asked: String, message: => Map[String, Any]): Unit = if (isFollowed) Driver.tell(asked, message)

  override def onQueryStarted(event: StreamingQueryListener.QueryStartedEvent): Unit = tell(
    "query_started",
    Map("query_id" -> event.id.toString, "run_id" -> event.runId.toString, "name" -> event.name))

  override def onQueryProgress(event: StreamingQueryListener.QueryProgressEvent): Unit =
    tell("query_progress", Map("progress" -> event.progress.json))

  override def onQueryTerminated(event: StreamingQueryListener.QueryTerminatedEvent): Unit = {
    Run.end(event.runId)
    tell("query_ended", Map("run_id" -> event.runId.toString, "error" -> event.exception))
  }
}

/**
 * An accumulator of an aggregation: its kind (coordinator/model/accumulator_kinds.py), input columns and state fields.
 *
 * @param words The size of its only state field, if that is several fields of Spark's.
 */
case class Accumulator(kind: String, inputs: Seq[String], state: Seq[String], words: Option[Int])

/** What an operator is, as Python's plan code says it; spark_jobs/plan/event_time.py (Upstream) explains each field. */
case class Facts(
    state: String,
    uri: String,
    appends: Boolean,
    hasWatermark: Boolean,
    name: String,
    again: String,
    lagMs: Long,
    mode: Option[String],
    modes: Seq[String],
    refused: Map[String, String],
    lateColumns: Map[String, Seq[String]],
    shards: Option[Int],
    sockets: Option[String],
    byPython: Option[String],
    idleMs: Option[java.lang.Long],
    accumulators: Option[Seq[Accumulator]]) {

  /** Plans, which users see in errors, show the state's name only. */
  override def toString: String = state

  def stateId: String = s"$uri/$state"

  /** The operator's own output mode, or else that of the query which is being planned; None if there is neither. */
  def modeIn(execution: Option[IncrementalExecution]): Option[String] =
    mode.orElse(execution.map(batch => Facts.mode(batch.outputMode)))
}

object Facts {
  /** Returns an output mode in Spark's word, in lower case. */
  def mode(mode: OutputMode): String = mode.toString.toLowerCase(Locale.ROOT)
}

/**
 * The exchange in front of an operator: rows of its inputs, each by its shard.
 *
 * @param inputs Rows with the columns that a shard reads, and their hash in a column `__hash`.
 * @param output Columns of the rows behind it: the route is the last one. A user's function gets the others, of which
 *   the last one has the batch, in the row after the last one of a shard.
 * @param planned The number of shards that the query was built with.
 * @param isTable Whether the rows are a whole result, not a stream of changes: nodes above are planned as for a table.
 */
case class StatefulExchange(
    inputs: Seq[LogicalPlan],
    output: Seq[Attribute],
    planned: Int,
    facts: Facts,
    isTable: Boolean = false)
  extends LogicalPlan
  with MultiInstanceRelation {
  override def children: Seq[LogicalPlan] = inputs

  override def producedAttributes: AttributeSet = outputSet

  /** No column of the inputs is pruned. */
  @transient override lazy val references: AttributeSet = AttributeSet(inputs.flatMap(_.output))

  override def isStreaming: Boolean = !isTable && super.isStreaming

  override def newInstance(): LogicalPlan = copy(output = output.map(_.newInstance()))

  override protected def withNewChildrenInternal(newChildren: IndexedSeq[LogicalPlan]): LogicalPlan =
    copy(inputs = newChildren)

  def route: Attribute = output.last
}

object StatefulExchange {
  /** Returns the exchange that a node is, but for projections above it; None if it is another node. */
  @tailrec def below(node: LogicalPlan): Option[StatefulExchange] = node match {
    case exchange: StatefulExchange => Some(exchange)
    case Project(_, child) => below(child)
    case _ => None
  }
}

/**
 * The tasks of an operator, which hand its rows over to store actors.
 *
 * @param operator The operator as store actors get it, in JSON (store_actors/client/operator_task.py).
 */
case class HandedOver(child: LogicalPlan, output: Seq[Attribute], operator: String)
  extends UnaryNode
  with MultiInstanceRelation {
  override def producedAttributes: AttributeSet = outputSet

  @transient override lazy val references: AttributeSet = child.outputSet

  override protected def stringArgs: Iterator[Any] = Iterator(output)

  override def newInstance(): LogicalPlan = copy(output = output.map(_.newInstance()))

  override protected def withNewChildInternal(newChild: LogicalPlan): HandedOver = copy(child = newChild)
}

/** Plans the fleet's operators, for as many shards as the batch has. */
object ExchangeStrategy extends SparkStrategy {
  override def apply(plan: LogicalPlan): Seq[SparkPlan] = plan match {
    case tasks: HandedOver => handedOver(tasks, tasks.output)
    // Names of results need no stage of their own.
    case Project(names, tasks: HandedOver) if areNames(names, tasks.output) => handedOver(tasks, plan.output)
    case Project(columns, child) if EpochProjectExec.isFor(columns) && EpochGate.of(SparkSession.active).isDefined =>
      EpochProjectExec(columns, planLater(child)) :: Nil
    case tasks: MapInArrow => called(tasks)
    case exchange: StatefulExchange => exec(exchange) :: Nil
    case EpochWatermark(eventTime, delayMs, child) => EpochTimesExec(eventTime, delayMs, planLater(child)) :: Nil
    case _ => Nil
  }

  private def handedOver(tasks: HandedOver, output: Seq[Attribute]): Seq[SparkPlan] =
    StatefulExchange.below(tasks.child).map { exchange =>
      EpochGate.of(SparkSession.active) match {
        case Some((query, gate)) =>
          val run = gate.runOf(query, exchange.facts, exchange.planned)
          EpochHandOverExec(output, rowsOf(exchange, run), tasks.operator, exchange.facts)(run)
        case None => HandOverExec(output, exec(exchange), tasks.operator)
      }
    }.toSeq

  private def rowsOf(exchange: StatefulExchange, run: EpochRun): SparkPlan =
    new OperatorRows(exchange, run.shards.shards, repeats = false, isContinuous = true).plan(planLater)

  /** Plans a user's function in a continuous query: a task calls it for each shard, for as long as the run. */
  private def called(tasks: MapInArrow): Seq[SparkPlan] =
    for {
      exchange <- StatefulExchange.below(tasks.child).toSeq
      (query, gate) <- EpochGate.of(SparkSession.active)
    } yield {
      val run = gate.runOf(query, exchange.facts, exchange.planned)
      val calls = new CallRows(query.sparkSession.sparkContext, run.shards.shards, tasks.child.schema)
      val called = tasks.withNewChildren(Seq(LogicalRDD(tasks.child.output, calls)(query.sparkSession)))
      EpochHandOverExec(tasks.output, rowsOf(exchange, run), "", exchange.facts, Some(planLater(called)))(run)
    }

  private def areNames(names: Seq[NamedExpression], columns: Seq[Attribute]): Boolean =
    names.size == columns.size && names.zip(columns).forall {
      case (Alias(column: Attribute, _), other) => column.exprId == other.exprId
      case (column, other) => column.exprId == other.exprId
    }

  private def exec(exchange: StatefulExchange): SparkPlan = {
    val session = SparkSession.active
    val batch = CurrentQuery.execution(session)
    val run = batch.map(execution => Run.of(execution).operator(exchange.facts))
    for (idleMs <- exchange.facts.idleMs; query <- CurrentQuery.query(session)) IdleSources.leaveOut(query, idleMs)
    val shards = batch.fold(exchange.planned)(run.get.shardsOf(_, exchange.planned).shards)
    val repeats = run.forall(_.repeats)
    val rows = new OperatorRows(exchange, shards, repeats).plan(planLater)
    val planningId = Option(session.sparkContext.getLocalProperty(SQLExecution.EXECUTION_ID_KEY))
    val partitioning = HashPartitioning(Seq(exchange.route), shards)
    StatefulExchangeExec(partitioning, rows, exchange.planned, exchange.facts)(batch, planningId)
  }
}
