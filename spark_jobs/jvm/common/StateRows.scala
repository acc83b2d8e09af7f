package org.apache.spark.sql.statefleet

import org.apache.spark.TaskContext
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{GenericInternalRow, JoinedRow, UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.catalyst.expressions.aggregate.TypedImperativeAggregate
import org.apache.spark.sql.catalyst.util.GenericArrayData
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.types.StructType
import org.apache.spark.util.SerializableConfiguration
import org.apache.spark.util.collection.OpenHashMap
import scala.jdk.CollectionConverters._

/**
 * Rows of a state store of a Spark checkpoint at a version: a task reads a partition of the state. Only Spark's
 * provider reads the files: no shared instance is registered, no maintenance runs, and nothing is written below the
 * checkpoint.
 *
 * @param folder The folder with the state of all operators.
 * @param store Name of the store.
 * @param keys Types of the key's columns, as in the store; so of the values.
 * @param prefix Number of leading columns of the key by which the operator looks up rows; 0 if it uses whole keys only.
 * @param rows Types of the key's columns and then the value's, as they are returned.
 * @param functions For each column of the value, the function whose buffer it is, if Spark stores that as bytes; or
 *   null.
 * @param snapshots For each partition the id in the names of its newest files; empty if they have none.
 */
case class StateRows(
    folder: String,
    operator: Long,
    store: String,
    version: Long,
    keys: StructType,
    values: StructType,
    prefix: Int,
    conf: StateStoreConf,
    hadoop: SerializableConfiguration,
    rows: StructType,
    functions: java.util.List[TypedImperativeAggregate[_]],
    snapshots: java.util.List[String])
  extends ((Int, Iterator[InternalRow]) => Iterator[InternalRow]) {

  override def apply(partition: Int, none: Iterator[InternalRow]): Iterator[InternalRow] = {
    val id = StateStoreId(folder, operator, partition, store)
    val provider = StateStoreProvider.create(conf.providerClass)
    val reader = openedStore(provider, id, this, snapshots.asScala.lift(partition))
    TaskContext.get().addTaskCompletionListener[Unit] { _ =>
      reader.abort()
      provider.close()
    }
    val projection = UnsafeProjection.create(rows)
    rowsOf(reader).map(pair => projection(new JoinedRow(pair.key, decoded(pair.value))))
  }

  /** Returns a value with columns in place of the buffers that Spark stores as bytes, for functions that have them. */
  private def decoded(value: UnsafeRow): InternalRow =
    if (functions.isEmpty) {
      value
    } else {
      val fields = values.fields.zip(functions.asScala).zipWithIndex.map {
        case (_, place) if value.isNullAt(place) => null
        case ((field, null), place) => value.get(place, field.dataType)
        case ((_, function), place) => decoded(function, value.getBinary(place))
      }
      new GenericInternalRow(fields)
    }

  /** Returns the values with their counts, for a function that counts them; else the function's result. */
  private def decoded[T](function: TypedImperativeAggregate[T], bytes: Array[Byte]): Any =
    function.deserialize(bytes) match {
      case counts: OpenHashMap[_, _] =>
        new GenericArrayData(counts.iterator.map { case (value, count) => InternalRow(value, count) }.toArray[Any])
      case buffer => function.eval(buffer)
    }
}
