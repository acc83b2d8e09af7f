package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.analysis.MultiInstanceRelation
import org.apache.spark.sql.catalyst.expressions.{Alias, Attribute, AttributeSet, NamedExpression}
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project, UnaryNode}
import org.apache.spark.sql.catalyst.plans.physical.HashPartitioning
import org.apache.spark.sql.execution.{SparkPlan, SparkStrategy, SQLExecution}
import scala.annotation.tailrec

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

object Operators {
  /**
   * Returns whether a node runs the tasks of an operator: those that hand rows over, or a user's function in Python
   * workers.
   */
  def areTasks(node: LogicalPlan): Boolean = node.isInstanceOf[HandedOver] || node.isInstanceOf[MapInArrow]
}

/** Plans the fleet's operators, for as many shards as the batch has. */
object ExchangeStrategy extends SparkStrategy {
  override def apply(plan: LogicalPlan): Seq[SparkPlan] = plan match {
    case tasks: HandedOver => handedOver(tasks, tasks.output)
    // Names of results need no stage of their own.
    case Project(names, tasks: HandedOver) if areNames(names, tasks.output) => handedOver(tasks, plan.output)
    case exchange: StatefulExchange => exec(exchange) :: Nil
    case _ => Nil
  }

  private def handedOver(tasks: HandedOver, output: Seq[Attribute]): Seq[SparkPlan] =
    HandOverExec(output, exec(exchangeBelow(tasks.child)), tasks.operator) :: Nil

  @tailrec private def exchangeBelow(plan: LogicalPlan): StatefulExchange = plan match {
    case exchange: StatefulExchange => exchange
    case Project(_, child) => exchangeBelow(child)
    case other => throw new IllegalStateException(s"an operator's tasks are above ${other.nodeName}")
  }

  /** Whether expressions are only other names for columns. */
  private def areNames(names: Seq[NamedExpression], columns: Seq[Attribute]): Boolean =
    names.size == columns.size && names.zip(columns).forall {
      case (Alias(column: Attribute, _), other) => column.exprId == other.exprId
      case (column, other) => column.exprId == other.exprId
    }

  private def exec(exchange: StatefulExchange): SparkPlan = {
    val session = SparkSession.active
    val batch = CurrentQuery.execution(session)
    val shards = batch.fold(exchange.planned) { execution =>
      Run.of(execution).operator(exchange.facts).shardsOf(execution, exchange.planned).shards
    }
    val repeats = batch.forall(execution => Run.of(execution).operator(exchange.facts).repeats)
    val rows = new OperatorRows(exchange, shards, repeats).plan(planLater)
    val planningId = Option(session.sparkContext.getLocalProperty(SQLExecution.EXECUTION_ID_KEY))
    val partitioning = HashPartitioning(Seq(exchange.route), shards)
    StatefulExchangeExec(partitioning, rows, exchange.planned, exchange.facts)(batch, planningId)
  }
}
