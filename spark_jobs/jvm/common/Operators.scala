package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.analysis.MultiInstanceRelation
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeSet}
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, UnaryNode}

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
