package org.apache.spark.sql

/** The names that classes of Spark 4 have here; Spark 3.5 has them in other packages. */
package object statefleet {
  type Dataset[T] = classic.Dataset[T]
  type SparkSession = classic.SparkSession
  type MapInArrow = catalyst.plans.logical.MapInArrow
  type MapInArrowExec = execution.python.MapInArrowExec
  type IncrementalExecution = execution.streaming.runtime.IncrementalExecution
  type StateStoreWriter = execution.streaming.operators.stateful.StateStoreWriter
  type StatefulOperatorStateInfo = execution.streaming.operators.stateful.StatefulOperatorStateInfo
  type StreamExecution = execution.streaming.runtime.StreamExecution
  val Dataset: classic.Dataset.type = classic.Dataset
  val SparkSession: classic.SparkSession.type = classic.SparkSession
  val StreamExecution: execution.streaming.runtime.StreamExecution.type = execution.streaming.runtime.StreamExecution
  val StreamMetadata: execution.streaming.runtime.StreamMetadata.type = execution.streaming.runtime.StreamMetadata
}
