package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.plans.logical.{Aggregate, Deduplicate, LogicalPlan, Project}
import org.apache.spark.sql.catalyst.rules.Rule

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
