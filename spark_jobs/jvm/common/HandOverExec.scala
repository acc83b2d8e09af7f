package org.apache.spark.sql.statefleet

import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeSet}
import org.apache.spark.sql.catalyst.plans.physical.{Partitioning, UnknownPartitioning}
import org.apache.spark.sql.execution.{SparkPlan, UnaryExecNode}
import org.apache.spark.sql.execution.exchange.ReusedExchangeExec

/** The tasks of an operator that hand rows over to store actors. */
case class HandOverExec(output: Seq[Attribute], child: SparkPlan, operator: String) extends UnaryExecNode {
  override def producedAttributes: AttributeSet = outputSet

  override def outputPartitioning: Partitioning = UnknownPartitioning(child.outputPartitioning.numPartitions)

  override protected def stringArgs: Iterator[Any] = Iterator(output)

  override protected def withNewChildInternal(newChild: SparkPlan): HandOverExec = copy(child = newChild)

  override protected def doExecute(): RDD[InternalRow] = {
    val rows = child.execute()
    rows.mapPartitionsWithIndexInternal(exchange.handedOver(operator, schema))
  }

  private def exchange: StatefulExchangeExec = child match {
    case exchange: StatefulExchangeExec => exchange
    case ReusedExchangeExec(_, exchange: StatefulExchangeExec) => exchange
    case other => throw new IllegalStateException(s"an operator's tasks are above ${other.nodeName}")
  }
}
