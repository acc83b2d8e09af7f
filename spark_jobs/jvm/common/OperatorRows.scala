package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.expressions._
import org.apache.spark.sql.catalyst.expressions.aggregate._
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project, Union}
import org.apache.spark.sql.catalyst.util.GenericArrayData
import org.apache.spark.sql.execution.{ProjectExec, SparkPlan}
import org.apache.spark.sql.execution.aggregate.{HashAggregateExec, SortAggregateExec}
import org.apache.spark.sql.types._
import scala.collection.mutable

/**
 * What is shuffled to the shards of an operator: the rows of its inputs, and the route to a shard as their last column.
 */
class OperatorRows(exchange: StatefulExchange, shards: Int, repeats: Boolean, isContinuous: Boolean = false) {
  private val facts = exchange.facts

  /**
   * Returns the planned rows.
   *
   * @param planned Returns the plan of rows.
   */
  def plan(planned: LogicalPlan => SparkPlan): SparkPlan = {
    val first = exchange.inputs.head
    if (isContinuous && values(first).isEmpty) return planned(Project(counts :+ route(hash(first)), first))
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

  /** The state of a single row without columns, of which the only accumulators are counts: the partial aggregation of one row. */
  private def counts: Seq[NamedExpression] = {
    val fields = facts.accumulators.toSeq.flatten.flatMap(_.state).map(field => s"|$field")
    (fields :+ ShardRows.CountColumn).map(Alias(Literal(1L), _)())
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

  private def route(hash: Expression): Alias = Alias(routeOf(hash), exchange.route.name)(exchange.route.exprId)

  private def routeOf(hash: Expression): Expression = {
    val routes = Literal(new GenericArrayData(Shards.routes(shards)), ArrayType(IntegerType, containsNull = false))
    GetArrayItem(routes, Pmod(hash, Literal(shards)), failOnError = false)
  }

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

/**
 * Spark's own partial aggregation of an operator's rows in front of its exchange. It gives a row for each group of a
 * map task: the keys, the fields of the group's state, and how many rows there were.
 *
 * Groups need not be whole: the shard merges rows of a group (store_actors/operators/aggregate.py). So keys are
 * compared by their bytes.
 *
 * @param fields The fields of the state, as the shard names them.
 * @param isSorted Whether rows are sorted by group, as by Spark: a state has a value that does not stay in its place
 *   when it changes, as texts.
 */
class PartialAggregation private (
    keys: Seq[Attribute],
    functions: Seq[AggregateFunction],
    fields: Seq[NamedExpression],
    isSorted: Boolean) {

  /** Returns the hash of the keys, by which rows go to shards. */
  def hash: Expression = if (keys.isEmpty) Literal(0) else new Murmur3Hash(keys)

  /** Returns the aggregated rows; `route` is their last column. */
  def over(rows: SparkPlan, route: NamedExpression): SparkPlan = {
    val count = Count(Literal(1))
    val all = functions :+ count
    val uses = all.map(AggregateExpression(_, Partial, isDistinct = false))
    val attributes = all.flatMap(_.aggBufferAttributes)
    val buffers = keys ++ all.flatMap(_.inputAggBufferAttributes)
    val aggregated =
      if (isSorted) SortAggregateExec(None, false, None, keys, uses, attributes, 0, buffers, rows)
      else HashAggregateExec(None, false, None, keys, uses, attributes, 0, buffers, rows)
    val columns = keys.map(key => Alias(key, s"|${key.name}")()) ++ fields
    val number = Alias(count.inputAggBufferAttributes.head, ShardRows.CountColumn)()
    ProjectExec(columns ++ Seq(number, route), aggregated)
  }
}

object PartialAggregation {
  /**
   * Returns the partial aggregation of rows; None if the state of an accumulator is not a buffer of Spark's generated
   * code.
   */
  def of(accumulators: Seq[Accumulator], columns: Seq[Attribute]): Option[PartialAggregation] = {
    val inputs = accumulators.flatMap(_.inputs).toSet
    val keys = columns.filterNot(column => column.name.startsWith("__") || inputs(column.name))
    val byName = columns.map(column => column.name -> column).toMap
    val states = accumulators.flatMap(accumulator => state(accumulator, byName))
    val isSorted = states.exists(_.buffer.exists(field => !UnsafeRow.isMutable(field.dataType)))
    val canSort = keys.forall(key => RowOrdering.isOrderable(key.dataType))
    if (states.size < accumulators.size || isSorted && !canSort) None
    else Some(new PartialAggregation(keys, states.map(_.function), states.flatMap(_.fields), isSorted))
  }

  private case class State(function: AggregateFunction, names: Seq[String]) {
    def buffer: Seq[Attribute] = function.inputAggBufferAttributes

    def fields: Seq[NamedExpression] = buffer.zip(names).map { case (field, name) => Alias(field, s"|$name")() }
  }

  private def state(accumulator: Accumulator, columns: Map[String, Attribute]): Option[State] = {
    val state = accumulator match {
      case Accumulator("distinct_registers", inputs, Seq(name), Some(words)) =>
        // Spark's own hashes the values itself; they are in a column beside that of the hashes, which the shard reads.
        Some(State(registers(columns(s"__${inputs.last}"), words), (0 until words).map(word => s"$name#$word")))
      case _ => function(accumulator.kind, accumulator.inputs.map(columns)).map(State(_, accumulator.state))
    }
    state.filter(found => found.buffer.size == found.names.size)
  }

  /**
   * Returns Spark's HyperLogLog++ with as many words of registers, of which there are a power of two, ten in a word.
   */
  private def registers(values: Expression, words: Int): AggregateFunction = {
    val precision = 31 - Integer.numberOfLeadingZeros(10 * words)
    // Spark rounds up to the precision that a standard deviation needs.
    HyperLogLogPlusPlus(values, 1.106 * 1.000001 / math.sqrt(1 << precision))
  }

  /**
   * Returns Spark's function of a kind of accumulator (coordinator/model/accumulator_kinds.py); None if it has none.
   */
  private def function(kind: String, inputs: Seq[Attribute]): Option[AggregateFunction] = (kind, inputs) match {
    case ("count_rows", _) => Some(Count(Literal(1)))
    case ("count_valid", values) => Some(Count(values))
    case ("sum_int" | "sum_float", Seq(values)) => Some(sum(values, isTried = false))
    case ("sum_decimal", Seq(values)) => Some(sum(Cast(values, summed(values)), isTried = false))
    // One that overflowed is null, by which the shard knows it.
    case ("sum_int_or_null" | "sum_int_checked", Seq(values)) if values.dataType == LongType =>
      Some(sum(values, isTried = true))
    case ("min", Seq(values)) => Some(Min(values))
    case ("max", Seq(values)) => Some(Max(values))
    case ("first", Seq(values)) => Some(First(values, ignoreNulls = false))
    case ("first_valid", Seq(values)) => Some(First(values, ignoreNulls = true))
    case ("last", Seq(values)) => Some(Last(values, ignoreNulls = false))
    case ("last_valid", Seq(values)) => Some(Last(values, ignoreNulls = true))
    case ("max_by", Seq(values, order)) => Some(MaxBy(values, order))
    case ("min_by", Seq(values, order)) => Some(MinBy(values, order))
    case ("product", Seq(values)) => Some(Product(values))
    case ("bit_and", Seq(values)) => Some(BitAndAgg(values))
    case ("bit_or", Seq(values)) => Some(BitOrAgg(values))
    case ("bit_xor", Seq(values)) => Some(BitXorAgg(values))
    case ("moments", Seq(values)) => Some(VariancePop(values))
    case ("moments_3", Seq(values)) => Some(Skewness(values))
    case ("moments_4", Seq(values)) => Some(Kurtosis(values))
    case ("covariance", Seq(left, right)) => Some(CovPopulation(left, right))
    case ("correlation", Seq(left, right)) => Some(Corr(left, right))
    case _ => None
  }

  /** Returns the type of the values whose sum has a type: Spark's sum of decimals has ten digits more, or 38. */
  private def summed(sum: Attribute): DecimalType = {
    val kind = sum.dataType.asInstanceOf[DecimalType]
    if (kind.precision == DecimalType.MAX_PRECISION) kind else DecimalType(kind.precision - 10, kind.scale)
  }
}
