package org.apache.spark.sql

/** The names that classes of Spark 3.5 have here; Spark 4 has them in other packages. */
package object statefleet {
  type Dataset[T] = org.apache.spark.sql.Dataset[T]
  type SparkSession = org.apache.spark.sql.SparkSession
  type MapInArrow = catalyst.plans.logical.PythonMapInArrow
  type MapInArrowExec = execution.python.PythonMapInArrowExec
  type IncrementalExecution = execution.streaming.IncrementalExecution
  type StateStoreWriter = execution.streaming.StateStoreWriter
  type StatefulOperatorStateInfo = execution.streaming.StatefulOperatorStateInfo
  type StreamExecution = execution.streaming.StreamExecution
  val Dataset: org.apache.spark.sql.Dataset.type = org.apache.spark.sql.Dataset
  val SparkSession: org.apache.spark.sql.SparkSession.type = org.apache.spark.sql.SparkSession
  val StreamExecution: execution.streaming.StreamExecution.type = execution.streaming.StreamExecution
  val StreamMetadata: execution.streaming.StreamMetadata.type = execution.streaming.StreamMetadata
}
