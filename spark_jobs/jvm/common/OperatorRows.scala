package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.expressions._
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project, Union}
import org.apache.spark.sql.catalyst.util.GenericArrayData
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.types.{ArrayType, BinaryType, ByteType, DataType, IntegerType}
import scala.collection.mutable

/**
 * What is shuffled to the shards of an operator: the rows of its inputs, and the route to a shard as their last column.
 */
class OperatorRows(exchange: StatefulExchange, shards: Int, repeats: Boolean) {
  import OperatorRows._

  private val facts = exchange.facts

  /**
   * Returns the planned rows.
   *
   * @param planned Returns the plan of rows.
   */
  def plan(planned: LogicalPlan => SparkPlan): SparkPlan = {
    val first = exchange.inputs.head
    // Rows without columns, which are only counted, cannot be sent.
    val partial =
      if (values(first).isEmpty || repeats) facts.accumulators.flatMap(PartialAggregation.of(_, first.output)) else None
    partial match {
      case Some(aggregation) => aggregation.over(planned(first), route(aggregation.hash))
      case None if exchange.inputs.size > 1 => planned(united)
      case None =>
        val columns = if (facts.byPython.isDefined) named(values(first)) else values(first)
        planned(Project(columns :+ route(hash(first)), first))
    }
  }

  /**
   * Returns a function's columns under their names in the plan, and the column of the row after the last one of a
   * shard, in which all others are null.
   */
  private def named(values: Seq[Attribute]): Seq[NamedExpression] =
    exchange.output.zip(values.map(KnownNullable(_)) :+ Literal(null, BinaryType)).map { case (column, value) =>
      Alias(value, column.name)(column.exprId)
    }

  /**
   * Returns the rows of all inputs as one: the number of the input, and then columns that have the names of the input
   * columns in them, such as `k0|k0` and `|r1`. Columns of a type share one, so that a row has few nulls.
   */
  private def united: LogicalPlan = {
    val types = mutable.Buffer.empty[DataType]
    val placed = exchange.inputs.map(rows => placedAmong(types, values(rows)))
    val names = types.indices.map(place => placed.map(_.get(place).fold("")(_.name)).mkString("|"))
    val projections = exchange.inputs.zip(placed).zipWithIndex.map { case ((rows, columns), number) =>
      val ofInput = Alias(Literal(number.toByte, ByteType), InputColumn)()
      val shared = types.indices.map { place =>
        Alias(columns.getOrElse(place, Literal(null, types(place))), names(place))()
      }
      // A union has the column ids of its first child.
      val toShard = if (number == 0) route(hash(rows)) else Alias(routeOf(hash(rows)), exchange.route.name)()
      Project((ofInput +: shared) :+ toShard, rows)
    }
    Union(projections, byName = false, allowMissingCol = false)
  }

  /** Returns the column of the route to a shard, by a hash. */
  private def route(hash: Expression): Alias = Alias(routeOf(hash), exchange.route.name)(exchange.route.exprId)

  private def routeOf(hash: Expression): Expression = {
    val routes = Literal(new GenericArrayData(Shards.routes(shards)), ArrayType(IntegerType, containsNull = false))
    GetArrayItem(routes, Pmod(hash, Literal(shards)), failOnError = false)
  }
}

object OperatorRows {
  /**
   * The column of an operator of several inputs that has the number of a row's input
   * (store_actors/client/operator_task.py).
   */
  private val InputColumn = "__input"
  private val HashColumn = "__hash"

  /** Returns the columns of an input that its shard reads. */
  private def values(rows: LogicalPlan): Seq[Attribute] = rows.output.filterNot(_.name.startsWith("__"))

  private def hash(rows: LogicalPlan): Attribute = rows.output.find(_.name == HashColumn).get

  /** Returns the columns by their places among columns of these types, which are added to. */
  private def placedAmong(types: mutable.Buffer[DataType], columns: Seq[Attribute]): Map[Int, Attribute] =
    columns.foldLeft(Map.empty[Int, Attribute]) { (placed, column) =>
      val free = types.indices.find(place => types(place) == column.dataType && !placed.contains(place))
      val place = free.getOrElse {
        types += column.dataType
        types.size - 1
      }
      placed + (place -> column)
    }
}
