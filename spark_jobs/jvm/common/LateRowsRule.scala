package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.expressions.{Alias, Attribute, Literal}
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project}
import org.apache.spark.sql.catalyst.rules.Rule

/**
 * Spark prunes the column of a watermark where nothing above its own operator reads it, and then no row is late for
 * that operator. An operator of the fleet is sent such a column all the same; here it becomes null, which is never
 * late.
 */
object LateRowsRule extends Rule[LogicalPlan] {
  override def apply(root: LogicalPlan): LogicalPlan = {
    // From the top down: a column that an operator gets may be all that reads the column of the operator below it.
    val columns = for (task <- tasks(root); column <- task.facts.lateColumns.keys) yield (task.facts.state, column)
    columns.distinct.foldLeft(root) { case (plan, (state, column)) => pruned(plan, state, column) }
  }

  /** An operator's exchange, and the node above it that emits its rows. */
  private case class Task(exchange: StatefulExchange, emitting: LogicalPlan) {
    def facts: Facts = exchange.facts
  }

  /** Returns the fleet's operators, each before those below it. */
  private def tasks(node: LogicalPlan, emitting: Option[LogicalPlan] = None): Seq[Task] = {
    val here = node match {
      case exchange: StatefulExchange => emitting.map(Task(exchange, _)).toSeq
      case _ => Nil
    }
    here ++ node.children.flatMap(tasks(_, if (Operators.areTasks(node)) Some(node) else emitting))
  }

  /**
   * Nulls the column in each exchange of an operator, or in none: one that is in the plan twice, as in a self join,
   * runs once.
   */
  private def pruned(root: LogicalPlan, state: String, column: String): LogicalPlan = {
    val found = tasks(root).filter(_.facts.state == state)
    val isRead = found.exists { task =>
      task.emitting.output.exists { emitted =>
        task.facts.lateColumns(column).contains(emitted.name) &&
        (root.outputSet.contains(emitted) || isReadAbove(root, task.emitting, emitted))
      }
    }
    if (isRead) {
      root
    } else {
      root.transformUp { case exchange: StatefulExchange if exchange.facts.state == state => nulled(exchange, column) }
    }
  }

  /** Whether a node that is not below the operator reads one of its columns. */
  private def isReadAbove(node: LogicalPlan, emitting: LogicalPlan, column: Attribute): Boolean =
    (node ne emitting) &&
      (node.references.contains(column) || node.children.exists(isReadAbove(_, emitting, column)))

  /** Returns the exchange with nulls in a column that is computed for it. */
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
