package org.apache.spark.sql.statefleet

import java.io.IOException
import org.apache.hadoop.fs.Path
import org.apache.spark.sql.AnalysisException
import org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
import org.apache.spark.sql.catalyst.expressions.{Alias, Literal}
import org.apache.spark.sql.catalyst.plans.logical.{Aggregate, Deduplicate, EventTimeWatermark, LogicalPlan, Project}
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.catalyst.streaming.{WriteToStream, WriteToStreamStatement}
import org.apache.spark.sql.connector.catalog.SupportsWrite
import org.apache.spark.sql.internal.SQLConf

/**
 * Checks a query when writeStream.start() has Spark analyse it. It refuses a query that would only fail in its first
 * batch, with an error that does not speak of exchanges. It stands before the rule that has Spark's own checks.
 */
class StartRule(session: SparkSession) extends Rule[LogicalPlan] {
  import StartRule._

  override def apply(plan: LogicalPlan): LogicalPlan = plan match {
    case query: WriteToStreamStatement =>
      val operators = operatorsOf(query.inputQuery)
      twice(operators).foreach { same =>
        refuse(
          "two stateful operators of the query have the same name, and would share one state; nothing was started; " +
            "give each a name of its own",
          same.facts)
      }
      if (operators.isEmpty) {
        plan
      } else {
        check(query, operators.filter(one => firstOf(operators, one) eq one))
        val filtered = new FilterPushdown(session).pushed(query.inputQuery)
        if (isContinuous(query)) return query.withNewChildren(Seq(CheckedContinuous(filtered)))
        // An operator that is in the plan twice, under different filters, runs once for both.
        if (twice(operatorsOf(filtered)).isEmpty) query.withNewChildren(Seq(filtered)) else query
      }
    case query: WriteToStream =>
      (query.inputQuery, query.sink) match {
        case (CheckedContinuous(checked), sink: SupportsWrite) =>
          val gate = new EpochGate
          query.copy(sink = EpochSink(sink, gate), inputQuery = EpochWatermark.in(ContinuousTable.under(checked, gate)))
        case _ => plan
      }
    case _ => plan
  }

  private def check(query: WriteToStreamStatement, operators: Seq[Operator]): Unit = {
    val mode = Facts.mode(query.outputMode)
    if (isContinuous(query)) checkContinuous(query, mode, operators)
    operators.foreach { operator =>
      if (operator.isLast) {
        checkMode(operator.facts, mode)
      } else if (operator.facts.mode.isEmpty && mode != "append") {
        refuse(
          s"the query runs in $mode mode, in which this operator emits a row again when it changes, and the one " +
            "above would count it twice; nothing was started; use append mode, or write its results to a sink and " +
            "read them in a second query",
          operator.facts)
      }
    }
    if (conf.isUnsupportedOperationCheckEnabled) checkAsSpark(query)
    checkStates(query, mode, operators)
  }

  /** Refuses a query that cannot run continuously, before Spark is asked, whose own answer speaks of other operators. */
  private def checkContinuous(query: WriteToStreamStatement, mode: String, operators: Seq[Operator]): Unit = {
    val facts = operators.head.facts
    def refuseTo(why: String): Nothing = refuse(
      s"$why; nothing was started; leave the trigger out, or use processingTime or availableNow",
      facts)
    if (!isContinuousTrigger(query)) {
      refuseTo(
        "stateful operators of the fleet run in batches or with trigger(continuous=..), and this is the trigger of " +
          "Spark's own real-time mode")
    }
    if (operators.size > 1) refuseTo("a continuous query has one stateful operator, and this one has several")
    if (facts.name == "symmetricHashJoin") refuseTo("a join runs in batches: a continuous query has one source")
    if (facts.mode.getOrElse(mode) == "complete") refuseTo("a continuous query emits in update mode or in append mode")
    if (query.inputQuery.collect { case watermark: EventTimeWatermark => watermark }.size > 1) {
      refuseTo("a continuous query has one watermark, and this one has several")
    }
  }

  override def conf: SQLConf = session.sessionState.conf

  private def checkStates(query: WriteToStreamStatement, mode: String, operators: Seq[Operator]): Unit = {
    val folder = checkpoint(query)
    Driver.tell(
      "start",
      Map(
        "query_id" -> folder.flatMap(queryId(_, query)),
        "has_checkpoint" -> folder.isDefined,
        "first_batch" -> folder.fold(Option(0L))(firstBatch(_, query)),
        "active" -> Driver.activeQueries(session),
        "operators" -> operators.map { operator =>
          val facts = operator.facts
          // Only where the operator has the query's mode: a mode of its own was compared when it was built.
          val queryMode = if (facts.mode.isEmpty) Some(mode) else None
          Map("uri" -> facts.uri, "state" -> facts.state, "route" -> operator.exchange.route.name, "mode" -> queryMode)
        }
      ),
      refuse)
    for (checkpoint <- folder if RepeatedSources.mayDiffer(checkpoint, query.hadoopConf)) {
      new RepeatedSources(session, checkpoint).fit(query.inputQuery)
    }
  }

  /** Returns the folder of the query's checkpoint; None if each start has a folder of its own. */
  private def checkpoint(query: WriteToStreamStatement): Option[String] =
    query.userSpecifiedCheckpointLocation.orElse {
      for (folder <- conf.checkpointLocation; name <- query.userSpecifiedName) yield s"$folder/$name"
    }
}

object StartRule {
  /** An operator of the fleet, and whether no other operator stands above it. */
  private case class Operator(exchange: StatefulExchange, isLast: Boolean) {
    def facts: Facts = exchange.facts
  }

  /**
   * Adds the rule to a session by reflection: Spark takes rules only when a session is created, which may be before a
   * fleet is connected.
   */
  def install(session: SparkSession): Unit = {
    val analyzer = session.sessionState.analyzer
    val field = analyzer.getClass.getDeclaredField("extendedResolutionRules")
    field.setAccessible(true)
    field.set(analyzer, new StartRule(session) +: analyzer.extendedResolutionRules)
  }

  /** Returns the operators of a plan, each before those below it. */
  private def operatorsOf(node: LogicalPlan, isLast: Boolean = true): Seq[Operator] = node match {
    case exchange: StatefulExchange =>
      Operator(exchange, isLast) +: exchange.children.flatMap(operatorsOf(_, isLast = false))
    case _ => node.children.flatMap(operatorsOf(_, isLast))
  }

  private def firstOf(operators: Seq[Operator], one: Operator): Operator =
    operators.find(_.facts.stateId == one.facts.stateId).get

  /**
   * Returns an operator that would share its state with another. One that is in the plan twice, as in a self join, runs
   * once.
   */
  private def twice(operators: Seq[Operator]): Option[Operator] = {
    operators.find(one => !firstOf(operators, one).exchange.sameResult(one.exchange))
  }

  private def checkMode(facts: Facts, mode: String): Unit = {
    facts.refused.get(mode).foreach(refuse(_, facts))
    if (!facts.modes.contains(mode)) {
      refuse(
        s"the operator emits its results for output mode ${Driver.json.writeValueAsString(facts.modes)} and the query runs in $mode " +
          "mode, which would take them for something else; nothing was started; give writeStream.outputMode(..) one " +
          "that it has, or leave outputMode out of fleet.stateful(..) if it was given",
        facts)
    }
  }

  /** Runs Spark's own check; its error is raised without the plan in its text. */
  private def checkAsSpark(query: WriteToStreamStatement): Unit =
    try UnsupportedOperationChecker.checkForStreaming(query.inputQuery, query.outputMode)
    catch { case error: AnalysisException => refuse(error.getSimpleMessage) }

  /** Returns the id of the query that a checkpoint belongs to; None if the query will be new. */
  private def queryId(folder: String, query: WriteToStreamStatement): Option[String] =
    StreamMetadata.read(new Path(new Path(folder), "metadata"), query.hadoopConf).map(_.id)

  /**
   * Returns the number of the first batch that a query runs: the one after the last in its commit log; None if that
   * cannot be listed.
   */
  private def firstBatch(folder: String, query: WriteToStreamStatement): Option[Long] =
    try {
      val commits = new Path(folder, "commits")
      val files = commits.getFileSystem(query.hadoopConf)
      val names = if (files.exists(commits)) files.listStatus(commits).map(_.getPath.getName) else Array.empty[String]
      Some(names.filter(_.matches("[0-9]+")).map(_.toLong + 1).foldLeft(0L)(math.max))
    } catch { case _: IOException => None }

  private def refuse(text: String, facts: Facts): Nothing = refuse(s"$text [state=`${facts.state}`]")

  private def refuse(text: String): Nothing =
    throw new AnalysisException(text, None, None, None, None, Map.empty, Array.empty)
}

/**
 * Above the exchange of an aggregation that has its query's output mode, or complete mode, stands an Aggregate that
 * aggregates nothing, so that Spark's checks see an aggregation. This rule takes it out before the query is planned.
 */
object UnmarkRule extends Rule[LogicalPlan] {
  override def apply(plan: LogicalPlan): LogicalPlan = unmarked(plan, asTable = true)

  /** asTable: whether no node above is stateful itself, as a streaming dropDuplicates is. */
  private def unmarked(plan: LogicalPlan, asTable: Boolean): LogicalPlan = {
    val isTable = asTable && !plan.isInstanceOf[Deduplicate]
    plan.withNewChildren(plan.children.map(unmarked(_, isTable))) match {
      case node: Aggregate => result(node.child, asTable).map(Project(node.aggregateExpressions, _)).getOrElse(node)
      case node => node
    }
  }

  /** Returns the exchange of an operator with the projections above it; None if the plan is no such exchange. */
  private def result(plan: LogicalPlan, asTable: Boolean): Option[LogicalPlan] = plan match {
    case Project(columns, child) => result(child, asTable).map(Project(columns, _))
    case exchange: StatefulExchange if !exchange.isTable =>
      val mode = exchange.facts.modeIn(CurrentQuery.execution(SparkSession.active))
      Some(exchange.copy(isTable = asTable && mode.contains("complete")))
    case _ => None
  }
}

/**
 * Spark prunes the column of a watermark where nothing above its own operator reads it, and then no row is late for
 * that operator. An operator of the fleet is sent such a column all the same; here it becomes null, which is never
 * late.
 */
object LateRowsRule extends Rule[LogicalPlan] {
  override def apply(root: LogicalPlan): LogicalPlan = {
    // From the top down: a column that an operator gets may be all that reads the column of the operator below it.
    val columns = for ((facts, _) <- operators(root); column <- facts.lateColumns.keys) yield (facts.state, column)
    columns.distinct.foldLeft(root) { case (plan, (state, column)) => pruned(plan, state, column) }
  }

  /** Returns the fleet's operators, each before those below it, with the nodes that emit their rows. */
  private def operators(root: LogicalPlan): Seq[(Facts, LogicalPlan)] =
    root.collect { case tasks @ (_: HandedOver | _: MapInArrow) =>
      StatefulExchange.below(tasks.children.head).map(exchange => (exchange.facts, tasks))
    }.flatten

  /**
   * Nulls the column in each exchange of an operator, or in none: one that is in the plan twice, as in a self join,
   * runs once.
   */
  private def pruned(root: LogicalPlan, state: String, column: String): LogicalPlan = {
    val emitted = operators(root).collect { case (facts, tasks) if facts.state == state =>
      tasks.output.filter(emitted => facts.lateColumns(column).contains(emitted.name))
    }.flatten
    if (emitted.exists(one => root.outputSet.contains(one) || root.exists(_.references.contains(one)))) {
      root
    } else {
      root.transformUp { case exchange: StatefulExchange if exchange.facts.state == state => nulled(exchange, column) }
    }
  }

  private def nulled(exchange: StatefulExchange, column: String): LogicalPlan =
    exchange.copy(inputs = exchange.inputs.map {
      case Project(columns, child) =>
        Project(
          columns.map {
            case late @ Alias(value, `column`) if !value.isInstanceOf[Literal] =>
              Alias(Literal(null, value.dataType), column)(late.exprId)
            case other => other
          },
          child)
      case other => other
    })
}
