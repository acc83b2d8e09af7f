package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.expressions.{Alias, Attribute, NamedExpression}
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project}
import org.apache.spark.sql.catalyst.plans.physical.HashPartitioning
import org.apache.spark.sql.execution.{SparkPlan, SparkStrategy, SQLExecution}
import scala.annotation.tailrec

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
