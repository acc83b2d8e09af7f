package org.apache.spark.sql.statefleet

import org.apache.spark.sql.types._

/** Which rows are sent as Spark has them in memory (store_actors/connections/unsafe_rows.py reads and writes them too). */
object UnsafeTypes {
  /** Returns whether rows of a type can be sent so. */
  def areSupported(rows: StructType): Boolean = rows.forall(field => isWord(field.dataType) || isText(field.dataType))

  /** Returns whether a row of a type has a size of its own. */
  def haveTexts(rows: StructType): Boolean = rows.exists(field => isText(field.dataType))

  private def isWord(kind: DataType): Boolean = kind match {
    case decimal: DecimalType => decimal.precision <= Decimal.MAX_LONG_DIGITS
    case BooleanType | ByteType | ShortType | IntegerType | LongType | FloatType | DoubleType => true
    case DateType | TimestampType | TimestampNTZType => true
    case _ => false
  }

  private def isText(kind: DataType): Boolean = kind.isInstanceOf[StringType] || kind == BinaryType
}
