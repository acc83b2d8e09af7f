package org.apache.spark.sql.statefleet

import org.apache.spark.sql.Row
import org.apache.spark.sql.catalyst.expressions._
import org.apache.spark.sql.catalyst.expressions.aggregate._
import org.apache.spark.sql.catalyst.optimizer.NormalizeFloatingNumbers
import org.apache.spark.sql.catalyst.plans.logical.{Aggregate, LogicalPlan, Project, Union}
import org.apache.spark.sql.catalyst.util.toPrettySQL
import org.apache.spark.sql.types.{BooleanType, Metadata}
import scala.jdk.CollectionConverters._

/**
 * An aggregation with DISTINCT as one without it, over several inputs: the rows, and for each set of distinct values the
 * rows that are the first of their group and values. Each aggregate reads those of one input.
 */
class DistinctAggregation private (session: SparkSession, aggregate: Aggregate) {
  import DistinctAggregation._

  private val uses = usesOf(aggregate)
  private val sets = uses.filter(isByValue).map(Values.of).distinct
  private val hasOthers = uses.exists(!isByValue(_))
  private val groups = aggregate.groupingExpressions.zipWithIndex.map { case (group, index) =>
    Alias(NormalizeFloatingNumbers.normalize(group), s"g$index")(explicitMetadata = metadataOf(group))
  }

  /** The columns that the other aggregates read. */
  private val read =
    uses.filterNot(isByValue).flatMap(_.references).distinct.filter(aggregate.child.outputSet.contains)

  /** The number of sets. */
  def size: Int = sets.length

  /** Returns what a set is of, in SQL. */
  def text(set: Int): String = sets(set).text

  /** Returns the grouping columns, and the values of a set, of each row. */
  def rows(set: Int): Dataset[Row] =
    Dataset.ofRows(session, Project(groups ++ sets(set).columns, aggregate.child))

  /** Returns the aggregation over the first rows of each set. */
  def over(firsts: java.util.List[Dataset[Row]]): Dataset[Row] = {
    val ofSets = firsts.asScala.toSeq.zip(sets).map { case (rows, set) => firstRows(rows.logicalPlan, set) }
    val inputs = if (hasOthers) others +: ofSets else ofSets
    val input = if (inputs.length == 1) inputs.head else Union(inputs)
    val columns = new Columns(input.output)
    val results = aggregate.aggregateExpressions.map {
      case group: Attribute => Alias(columns.replaced(group), group.name)(group.exprId, group.qualifier)
      case result => columns.replaced(result).asInstanceOf[NamedExpression]
    }
    Dataset.ofRows(
      session,
      aggregate.copy(groupingExpressions = columns.groups, aggregateExpressions = results, child = input))
  }

  private def others: LogicalPlan =
    Project((groups ++ read ++ sets.flatMap(_.columns).map(absent)) :+ inputOf(""), aggregate.child)

  private def firstRows(rows: LogicalPlan, of: Values): LogicalPlan = {
    val (keys, values) = rows.output.splitAt(groups.length)
    val ofSets = sets.flatMap(set => if (set == of) values else set.columns.map(absent))
    Project((keys ++ read.map(absent) ++ ofSets) :+ inputOf(of.text), rows)
  }

  /** The columns of the aggregation's input, in place of those of its rows. */
  private class Columns(output: Seq[Attribute]) {
    val groups: Seq[Attribute] = output.take(aggregate.groupingExpressions.length)
    private val ofRows = AttributeMap(read.zip(output.slice(groups.length, groups.length + read.length)))
    private val ofSets = {
      val widths = sets.map(_.columns.length)
      widths.scanLeft(groups.length + read.length)(_ + _).zip(widths).map { case (from, width) =>
        output.slice(from, from + width)
      }
    }

    def replaced(expression: Expression): Expression = expression match {
      case use: AggregateExpression if isByValue(use) => ofValues(use)
      case use: AggregateExpression =>
        val ofInput = use.mapChildren(_.transform { case column: Attribute => ofRows.getOrElse(column, column) })
        only(ofInput.asInstanceOf[AggregateExpression].copy(isDistinct = false), "")
      case group if groupOf(group) >= 0 => groups(groupOf(group))
      case other => other.mapChildren(replaced)
    }

    private def groupOf(expression: Expression): Int =
      aggregate.groupingExpressions.indexWhere(_.semanticEquals(expression))

    private def ofValues(use: AggregateExpression): AggregateExpression = {
      val set = sets.indexOf(Values.of(use))
      // As it was written first: the name of the set is a text.
      val of = sets(set)
      val found = ofSets(set)
      val arguments = use.aggregateFunction.children.map { argument =>
        val at = of.values.indexWhere(_.semanticEquals(argument))
        if (at < 0) argument else found(at)
      }
      val function = use.aggregateFunction.withNewChildren(arguments).asInstanceOf[AggregateFunction]
      only(use.copy(aggregateFunction = function, isDistinct = false, filter = of.where.map(_ => found.last)), of.text)
    }

    private def only(use: AggregateExpression, input: String): AggregateExpression = {
      val isOfInput = EqualTo(output.last, Literal(input))
      use.copy(filter = Some(use.filter.fold[Expression](isOfInput)(And(isOfInput, _))))
    }
  }
}

object DistinctAggregation {
  /**
   * The column that says of which values a row is; empty for the rows that the other aggregates read. Conditions on it are
   * part of what an aggregate is (`fingerprint_of`), as are the names of values: neither depends on the other aggregates.
   */
  private final val Input = "__values"

  private def inputOf(values: String) = Alias(Literal(values), Input)()

  private def absent(column: NamedExpression) = Alias(Literal(null, column.dataType), column.name)()

  /** Returns the aggregation with DISTINCT that a frame is; null for any other frame. */
  def of(frame: Dataset[Row]): DistinctAggregation = frame.queryExecution.analyzed match {
    case aggregate: Aggregate if usesOf(aggregate).exists(_.isDistinct) =>
      new DistinctAggregation(frame.sparkSession, aggregate)
    case _ => null
  }

  /** The event time of a group is marked in it. */
  private def metadataOf(group: Expression): Option[Metadata] = group match {
    case named: NamedExpression => Some(named.metadata)
    case _ => None
  }

  private def usesOf(aggregate: Aggregate): Seq[AggregateExpression] =
    aggregate.aggregateExpressions.flatMap(_.collect { case use: AggregateExpression => use })

  /** Whether an aggregate reads each value of a group once; that of others is the same with every row. */
  private def isByValue(use: AggregateExpression): Boolean = use.isDistinct && (use.aggregateFunction match {
    case _: Max | _: Min | _: CollectSet => false
    case _ => true
  })

  /** Expressions of which each combination of values is counted once, where the condition holds. */
  private case class Values(values: Seq[Expression], where: Option[Expression]) {
    /** The values, and whether the condition holds. */
    val columns: Seq[Alias] =
      values.map(value => Alias(NormalizeFloatingNumbers.normalize(value), toPrettySQL(value))()) ++
      where.map(condition => Alias(Coalesce(Seq(condition, Literal(false, BooleanType))), toPrettySQL(condition))())

    def text: String = values.map(toPrettySQL(_)).mkString(" ") + where.fold("")(" where " + toPrettySQL(_))

    private val compared = (values.map(_.canonicalized), where.map(_.canonicalized))

    override def equals(other: Any): Boolean = other match {
      case same: Values => compared == same.compared
      case _ => false
    }

    override def hashCode: Int = compared.hashCode
  }

  private object Values {
    def of(use: AggregateExpression): Values = {
      val (constants, values) = use.aggregateFunction.children.partition(_.foldable)
      Values(if (values.isEmpty) constants else values, use.filter)
    }
  }
}
