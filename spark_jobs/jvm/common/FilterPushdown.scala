package org.apache.spark.sql.statefleet

import java.util.IdentityHashMap
import org.apache.spark.sql.catalyst.expressions._
import org.apache.spark.sql.catalyst.plans.logical._
import org.apache.spark.sql.catalyst.trees.TreeNodeTag
import scala.annotation.tailrec
import scala.collection.mutable

/**
 * Filters that Spark moves below an operator, because of what follows it, and below the operator's watermark where it
 * can.
 *
 * Only rows that pass them move the watermark, and so they decide which rows are late; and rows that do not pass them
 * take no room in the state. Spark's optimizer moves a filter on the groups of an aggregation, or on a side of a join,
 * through the operator; it cannot move a filter through an operator of the fleet. So it optimises the query with
 * Spark's own operators in their places: once to find which filters it puts below a watermark, and once for those that
 * reach the plan that an operator is built of. There they are put in the query. They only leave out rows that add to no
 * result, and stay where they were, too.
 */
class FilterPushdown(session: SparkSession) extends PredicateHelper {
  /** Conditions by watermark, and by the number of an input; None for rows that have several, or none. */
  private val ofWatermarks = mutable.Map.empty[(ExprId, Any), Option[Expression]].withDefaultValue(None)
  private val ofInputs = mutable.Map.empty[Int, Option[Expression]].withDefaultValue(None)

  /** The nodes of the query, and the numbers of those that are an operator's input. */
  private val nodes = new IdentityHashMap[LogicalPlan, Unit]
  private val inputs = new IdentityHashMap[LogicalPlan, Int]

  /** Returns the query with these filters; the query itself if there are none. */
  def pushed(query: LogicalPlan): LogicalPlan =
    if (!hasOperator(query)) {
      query
    } else {
      optimised(asSparks(query)).foreach {
        case watermark: EventTimeWatermark =>
          val below = new Filtered(watermark.child)
          if (below.rows.isInstanceOf[ReturnAnswer]) remember(ofWatermarks, key(watermark), below.condition)
        case _ =>
      }
      query.foreach(nodes.put(_, ()))
      // A filter that has reached an operator's input moves on through the operators below that input.
      var differs = true
      var rounds = 0
      while (differs && rounds <= inputs.size) {
        val found = mutable.Map.empty[Int, Option[Expression]]
        collectAtInputs(optimised(withInputs(query, isInOperator = false)), found)
        differs = found.map { case (input, condition) => add(input, condition) }.exists(identity)
        rounds += 1
      }
      filtered(query, isInOperator = false)
    }

  private def optimised(plan: LogicalPlan): LogicalPlan = session.sessionState.optimizer.execute(plan)

  /**
   * Adds new parts to the condition of an input; returns whether there were any. Spark drops filters that already hold
   * below.
   */
  private def add(input: Int, found: Option[Expression]): Boolean = {
    val before = ofInputs(input).toSeq
    val known = before.flatMap(parts)
    val added = found.toSeq.flatMap(parts).filterNot(part => known.exists(_.semanticEquals(part)))
    ofInputs(input) = (before ++ added).reduceOption(And)
    added.nonEmpty
  }

  /** Returns the query with Spark's own operators, closed to filters at each input: the nodes that both plans have. */
  private def withInputs(node: LogicalPlan, isInOperator: Boolean): LogicalPlan =
    if (isInOperator && node.isStreaming && nodes.containsKey(node)) {
      if (!inputs.containsKey(node)) inputs.put(node, inputs.size)
      val number = inputs.get(node)
      val input = ReturnAnswer(where(withInputs(node, isInOperator = false), ofInputs(number)))
      input.setTagValue(Input, number)
      input
    } else {
      node.getTagValue(Analysed) match {
        case Some(analysed) => named(node, withInputs(analysed, isInOperator = true))
        case None => ofBatch(node.withNewChildren(node.children.map(withInputs(_, isInOperator))))
      }
    }

  /**
   * isInOperator: whether the input of an operator is still below; the same rows may be read by another node,
   * unfiltered.
   */
  private def filtered(node: LogicalPlan, isInOperator: Boolean): LogicalPlan = {
    val isInput = isInOperator && inputs.containsKey(node)
    val isInOperatorBelow = isInOperator && !isInput || isOperator(node)
    val children = node.children.map(filtered(_, isInOperatorBelow))
    val rows = node.withNewChildren(node match {
      case watermark: EventTimeWatermark => children.map(where(_, ofWatermarks(key(watermark))))
      case _ => children
    })
    if (isInput) where(rows, ofInputs(inputs.get(node))) else rows
  }

  /** On the results of an operator: Spark's own operator, as it was analysed. Python sets it. */
  private val Analysed = TreeNodeTag[LogicalPlan]("statefleet.analysed")

  /** On a node that no filter is moved through: the number of the input below it. */
  private val Input = TreeNodeTag[Int]("statefleet.input")

  private def isOperator(node: LogicalPlan): Boolean = node.getTagValue(Analysed).isDefined

  private def hasOperator(plan: LogicalPlan): Boolean = plan.exists(isOperator)

  private def parts(condition: Expression): Seq[Expression] = splitConjunctivePredicates(condition)

  private def asSparks(node: LogicalPlan): LogicalPlan = node.getTagValue(Analysed) match {
    case Some(analysed) => named(node, asSparks(analysed))
    case None =>
      val isLowestWatermark = node.isInstanceOf[EventTimeWatermark] && !node.children.exists(hasOperator)
      val children = node.children.map(asSparks)
      // No filter is moved through a ReturnAnswer, so filters stay where pushed() looks for them.
      ofBatch(node.withNewChildren(if (isLowestWatermark) children.map(ReturnAnswer(_)) else children))
  }

  /** Returns Spark's own operator with the column ids of the fleet's. */
  private def named(results: LogicalPlan, own: LogicalPlan): LogicalPlan =
    Project(
      results.output.zip(own.output).map {
        // A self join gives the columns of one side other ids.
        case (column, ownColumn) if column.exprId != ownColumn.exprId => Alias(ownColumn, column.name)(column.exprId)
        case (_, ownColumn) => ownColumn
      },
      own)

  /**
   * Returns the node with the time of a batch as Spark has it in a running query: no constant, so it moves no filter.
   */
  private def ofBatch(node: LogicalPlan): LogicalPlan = node.mapExpressions(_.transform {
    case time @ (_: CurrentTimestampLike | _: CurrentDate | _: LocalTimestamp) =>
      CurrentBatchTimestamp(0L, time.dataType, Some("UTC"))
  })

  private def collectAtInputs(node: LogicalPlan, found: mutable.Map[Int, Option[Expression]]): Unit = {
    val below = new Filtered(node)
    below.rows match {
      case input: ReturnAnswer => input.getTagValue(Input).foreach(remember(found, _, below.condition))
      case _ =>
    }
    below.rows.children.foreach(collectAtInputs(_, found))
  }

  /** Rows in an optimised plan, and the filters above them. */
  private class Filtered(top: LogicalPlan) {
    private val conditions = mutable.Buffer.empty[Expression]
    private val functions = mutable.Map.empty[ExprId, PythonUDF]
    val rows: LogicalPlan = below(top)

    @tailrec private def below(node: LogicalPlan): LogicalPlan = node match {
      case Filter(condition, child) =>
        conditions ++= parts(condition)
        below(child)
      case Project(_, child) => below(child)
      case calls: BaseEvalPython =>
        functions ++= calls.resultAttrs.map(_.exprId).zip(calls.udfs)
        below(calls.child)
      case _ => node
    }

    /** Returns the part of the filters that reads only columns of the rows; None if there is none. */
    def condition: Option[Expression] =
      conditions
        .map(_.transform { case result: Attribute => functions.getOrElse(result.exprId, result) })
        .filter(part => part.references.subsetOf(rows.outputSet) && !SubqueryExpression.hasSubquery(part))
        .reduceOption(And)
  }

  /** A stream that is read in several places has filters of its own in each: then no row may be left out for all. */
  private def remember[K](known: mutable.Map[K, Option[Expression]], key: K, condition: Option[Expression]): Unit = {
    def isSame(other: Option[Expression]) = other.exists(one => condition.exists(one.semanticEquals))
    known(key) = if (known.get(key).forall(isSame)) condition else None
  }

  /** Returns the rows that fulfil a condition; all rows if they lack its columns. */
  private def where(rows: LogicalPlan, condition: Option[Expression]): LogicalPlan =
    condition.filter(_.references.subsetOf(rows.outputSet)).fold(rows)(Filter(_, rows))

  private def key(watermark: EventTimeWatermark): (ExprId, Any) = (watermark.eventTime.exprId, watermark.delay)
}
