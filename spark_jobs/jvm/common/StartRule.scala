package org.apache.spark.sql.statefleet

import java.io.IOException
import org.apache.hadoop.fs.Path
import org.apache.spark.sql.AnalysisException
import org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement
import org.apache.spark.sql.internal.SQLConf
import scala.collection.mutable

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
        check(query, distinct(operators))
        val filtered = new FilterPushdown(session).pushed(query.inputQuery)
        // An operator that is in the plan twice, under different filters, runs once for both.
        if (twice(operatorsOf(filtered)).isEmpty) query.withNewChildren(Seq(filtered)) else query
      }
    case _ => plan
  }

  private def check(query: WriteToStreamStatement, operators: Seq[Operator]): Unit = {
    val mode = Mode.of(query.outputMode)
    if (Triggers.isContinuous(query)) {
      refuse(
        "stateful operators run in batches, the fleet's as well as Spark's, and a continuous query has none; nothing " +
          "was started; leave the trigger out, or use processingTime or availableNow",
        operators.head.facts)
    }
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

  override def conf: SQLConf = session.sessionState.conf

  private def checkStates(query: WriteToStreamStatement, mode: String, operators: Seq[Operator]): Unit = {
    val folder = checkpoint(query)
    val answer = Driver.ask[Refusal](
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
      ))
    answer.refused.foreach(refuse)
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

  /** Why a query may not start; None if it may. */
  case class Refusal(refused: Option[String])

  /**
   * Adds the rule to a session by reflection: Spark takes rules only when a session is created, which may be before a
   * fleet is connected.
   */
  def install(session: SparkSession): Unit = {
    val analyzer = session.sessionState.analyzer
    val rules = analyzer.extendedResolutionRules
    if (!rules.exists(_.isInstanceOf[StartRule])) {
      try {
        val field = analyzer.getClass.getDeclaredField("extendedResolutionRules")
        field.setAccessible(true)
        field.set(analyzer, new StartRule(session) +: rules)
      } catch {
        case error: ReflectiveOperationException =>
          throw new IllegalStateException("this session's analyzer takes no rules", error)
      }
    }
  }

  /** Returns the operators of a plan, each before those below it. */
  private def operatorsOf(node: LogicalPlan, isLast: Boolean = true): Seq[Operator] = node match {
    case exchange: StatefulExchange =>
      Operator(exchange, isLast) +: exchange.children.flatMap(operatorsOf(_, isLast = false))
    case _ => node.children.flatMap(operatorsOf(_, isLast))
  }

  /** Returns the first operator of each state. */
  private def distinct(operators: Seq[Operator]): Seq[Operator] = {
    val seen = mutable.Set.empty[String]
    operators.filter(operator => seen.add(operator.facts.stateId))
  }

  /**
   * Returns an operator that would share its state with another. One that is in the plan twice, as in a self join, runs
   * once.
   */
  private def twice(operators: Seq[Operator]): Option[Operator] = {
    val firsts = distinct(operators).map(operator => operator.facts.stateId -> operator.exchange).toMap
    operators.find(operator => !firsts(operator.facts.stateId).sameResult(operator.exchange))
  }

  private def checkMode(facts: Facts, mode: String): Unit = {
    facts.refused.get(mode).foreach(refuse(_, facts))
    if (!facts.modes.contains(mode)) {
      refuse(
        s"the operator emits its results for output mode ${Json.write(facts.modes)} and the query runs in $mode " +
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
