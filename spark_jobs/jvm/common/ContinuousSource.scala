package org.apache.spark.sql.statefleet

import java.lang.{Iterable => JavaIterable}
import java.lang.reflect.{InvocationTargetException, Method}
import java.time.Duration
import java.util.{Collection => JavaCollection, Collections, Map => JavaMap, OptionalLong, Set => JavaSet}
import org.apache.spark.{SparkEnv, TaskContext}
import org.apache.spark.deploy.security.HadoopDelegationTokenManager
import org.apache.spark.internal.Logging
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.catalyst.streaming.StreamingRelationV2
import org.apache.spark.sql.connector.catalog.{Column, SupportsRead, Table, TableCapability}
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.metric.{CustomMetric, CustomTaskMetric}
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.read.streaming._
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap
import scala.annotation.nowarn
import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal

/** What the fleet does at the epochs of a continuous query; Spark calls it on its own threads of the driver. */
trait EpochHooks {
  /** Whether the query is to plan its tasks again; called before each epoch. */
  def isToReconfigure(): Boolean

  /** Called before Spark's offset log gets the end of an epoch. */
  def ended(end: SourceEnd): Unit

  /** Called once Spark's commit log has an epoch, with the offset at the epoch's end. */
  def logged(end: Offset): Unit
}

/**
 * Where an epoch ends in its source.
 *
 * @param source What Spark calls the source.
 * @param newest The end of what the source has, if it says so, and how far the partitions are behind it.
 */
case class SourceEnd(source: String, offset: Offset, newest: Option[Offset], behind: Seq[Long])

/** A table that stands in front of another one, and is as that one where nothing else is said. */
trait TableInFront extends Table {
  def table: Table

  override def name(): String = table.name()

  @nowarn("cat=deprecation")
  override def schema(): StructType = table.schema()

  override def columns(): Array[Column] = table.columns()

  override def partitioning(): Array[Transform] = table.partitioning()

  override def properties(): JavaMap[String, String] = table.properties()

  override def capabilities(): JavaSet[TableCapability] = table.capabilities()

  override def toString: String = table.toString
}

/** A table that a continuous query reads, with the fleet's part in its epochs, and with a reader of Kafka's own. */
case class ContinuousTable(table: Table with SupportsRead)(hooks: EpochHooks) extends TableInFront with SupportsRead {
  override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder =
    new ContinuousScan(table.newScanBuilder(options), hooks)
}

object ContinuousTable {
  /** Returns a query's plan with the fleet's part in the epochs of the sources that can be read continuously. */
  def under(plan: LogicalPlan, hooks: EpochHooks): LogicalPlan = plan.transform { case source: StreamingRelationV2 =>
    source.table match {
      case _: ContinuousTable => source
      case table: SupportsRead if table.capabilities().contains(TableCapability.CONTINUOUS_READ) =>
        source.copy(table = ContinuousTable(table)(hooks))
      case _ => source
    }
  }
}

/** The scan that a table's own builder builds, but for its continuous stream. */
private class ContinuousScan(builder: ScanBuilder, hooks: EpochHooks)
  extends SupportsPushDownRequiredColumns with Scan {
  private lazy val scan = builder.build()

  override def build(): Scan = this

  override def pruneColumns(columns: StructType): Unit = builder match {
    case pruning: SupportsPushDownRequiredColumns => pruning.pruneColumns(columns)
    case _ =>
  }

  override def toContinuousStream(checkpoint: String): ContinuousStream =
    new EpochStream(scan.toContinuousStream(checkpoint), hooks)

  override def toMicroBatchStream(checkpoint: String): MicroBatchStream = scan.toMicroBatchStream(checkpoint)

  override def toBatch: Batch = scan.toBatch

  override def readSchema(): StructType = scan.readSchema()

  override def description(): String = scan.description()

  override def supportedCustomMetrics(): Array[CustomMetric] = scan.supportedCustomMetrics()

  override def reportDriverMetrics(): Array[CustomTaskMetric] = scan.reportDriverMetrics()

  override def columnarSupportMode(): Scan.ColumnarSupportMode = scan.columnarSupportMode()
}

/** A source's stream, with the fleet's part in its epochs. */
private class EpochStream(stream: ContinuousStream, hooks: EpochHooks)
  extends ContinuousStream with AcceptsLatestSeenOffset {
  override def createContinuousReaderFactory(): ContinuousPartitionReaderFactory = {
    val factory = stream.createContinuousReaderFactory()
    if (KafkaCalls.fit(stream)) new KafkaReaders(factory) else factory
  }

  override def needsReconfiguration(): Boolean = hooks.isToReconfigure() || stream.needsReconfiguration()

  override def commit(end: Offset): Unit = {
    stream.commit(end)
    hooks.logged(end)
  }

  override def mergeOffsets(offsets: Array[PartitionOffset]): Offset = {
    val positions = offsets.toSeq.collect { case position: KafkaPosition => position }
    val end =
      if (positions.isEmpty) SourceEnd(stream.toString, stream.mergeOffsets(offsets), None, Nil)
      else {
        val behind = positions.map(position => position.newest - position.offset)
        SourceEnd(stream.toString, merged(positions, _.offset), Some(merged(positions, _.newest)), behind)
      }
    hooks.ended(end)
    end.offset
  }

  private def merged(positions: Seq[KafkaPosition], offset: KafkaPosition => Long): Offset = {
    val topics = positions.groupBy(_.topic).map { case (topic, of) =>
      topic -> of.map(position => position.partition.toString -> offset(position)).toMap
    }
    stream.deserializeOffset(Driver.json.writeValueAsString(topics))
  }

  override def planInputPartitions(start: Offset): Array[InputPartition] = stream.planInputPartitions(start)

  override def initialOffset(): Offset = stream.initialOffset()

  override def deserializeOffset(json: String): Offset = stream.deserializeOffset(json)

  override def setLatestSeenOffset(offset: Offset): Unit = stream match {
    case accepting: AcceptsLatestSeenOffset => accepting.setLatestSeenOffset(offset)
    case _ =>
  }

  override def stop(): Unit = stream.stop()

  override def toString: String = stream.toString
}

/** The offset of the next record of a partition, and of the one after all that there are. */
private case class KafkaPosition(topic: String, partition: Int, offset: Long, newest: Long) extends PartitionOffset

/** @param factory Spark's own, whose readers are used where an offset is out of range. */
private class KafkaReaders(factory: ContinuousPartitionReaderFactory) extends ContinuousPartitionReaderFactory {
  override def createReader(partition: InputPartition): ContinuousPartitionReader[InternalRow] =
    new KafkaReader(partition, factory, TaskContext.get())
}

/**
 * Reads a partition of Kafka's from one offset on. Spark's own reader seeks before each poll, which drops what the
 * consumer has fetched ahead, and asks for the partition's first and last offset after it: two more requests.
 *
 * The consumer is opened, used and closed by the thread that reads, which Spark interrupts when the task ends.
 */
private class KafkaReader(input: InputPartition, factory: ContinuousPartitionReaderFactory, context: TaskContext)
  extends ContinuousPartitionReader[InternalRow] with Logging {
  import KafkaCalls.property

  private val calls = new KafkaCalls(input.getClass.getClassLoader)
  private val partition = property[AnyRef](input, "topicPartition")
  private val topic = property[String](partition, "topic")
  private val number = property[Int](partition, "partition")
  private val parameters = property[AnyRef](input, "kafkaParams")
  private val timeoutMs = property[Long](input, "pollTimeoutMs")
  private val isToFail = property[Boolean](input, "failOnDataLoss")
  private val hasHeaders = property[Boolean](input, "includeHeaders")
  private val converter = calls.converter(hasHeaders)
  private var consumer: calls.Consumer = _
  private var rows: Iterator[UnsafeRow] = Iterator.empty
  private var row: UnsafeRow = _
  private var offset = property[Long](input, "startOffset")
  private var newest = offset

  override def next(): Boolean = {
    while (!rows.hasNext && !context.isInterrupted() && !context.isCompleted()) rows = polled()
    val isFound = rows.hasNext
    if (isFound) {
      row = rows.next()
      offset = nextOffset(row)
    }
    isFound
  }

  /** Spark copies the row. */
  override def get(): InternalRow = row

  override def getOffset(): PartitionOffset = KafkaPosition(topic, number, offset, math.max(newest, offset))

  override def close(): Unit = if (consumer != null) {
    // Kafka does not end a consumer's sessions in a thread that is still interrupted.
    Thread.interrupted()
    try consumer.close()
    catch { case NonFatal(error) => logInfo(s"The consumer of $partition was not closed in order", error) }
    consumer = null
  }

  /** Returns the rows of a poll; none if nothing came in time. */
  private def polled(): Iterator[UnsafeRow] =
    try {
      if (consumer != null && consumer.hasOldToken) close()
      if (consumer == null) {
        consumer = new calls.Consumer(partition, parameters)
        consumer.seek(offset)
      }
      val records = consumer.poll(timeoutMs)
      newest = offset + consumer.ahead
      records.map(converter)
    } catch {
      case NonFatal(_) if Thread.currentThread.isInterrupted => throw new InterruptedException
      case error if calls.isTimeout(error) => Iterator.empty
      case error if calls.isOutOfRange(error) => foundBySpark()
    }

  /** Has Spark's own reader raise its error, or log what is lost and find the next record, which is returned. */
  private def foundBySpark(): Iterator[UnsafeRow] = {
    // Spark's reader would look for this offset again and again, without a pause.
    if (!isToFail && offset > consumer.end()) {
      val first = consumer.beginning()
      logWarning(
        s"$partition ends before offset $offset, where it was to be read on: it was deleted and made again, and " +
          s"records may be lost; it is read from its first offset, $first")
      offset = first
    }
    val reader = factory.createReader(calls.inputFrom(input, offset))
    try {
      if (reader.next()) {
        val found = reader.get().asInstanceOf[UnsafeRow]
        consumer.seek(nextOffset(found))
        Iterator.single(found)
      } else {
        Iterator.empty
      }
    } finally reader.close()
  }

  private def nextOffset(record: UnsafeRow): Long = record.getLong(KafkaCalls.OffsetColumn) + 1
}

/**
 * Calls of Spark's source for Kafka and of Kafka's consumer, whose classes the compiler does not have. They are found
 * by reflection, so none is made for each record.
 */
private class KafkaCalls(loader: ClassLoader) { calls =>
  private val converters = of("org.apache.spark.sql.kafka010.KafkaRecordToRowConverter")
  private val toRow = converters.getMethod("toUnsafeRowProjector", classOf[Boolean])
  private val partitions = of("org.apache.kafka.common.TopicPartition")
  private val inputs = of("org.apache.spark.sql.kafka010.KafkaContinuousInputPartition")
  private val copy = inputs.getMethod("copy", inputs.getConstructors.head.getParameterTypes: _*)
  private val holders = of("org.apache.spark.sql.kafka010.consumer.InternalKafkaConsumer")
  private val newHolder = holders.getConstructor(partitions, classOf[JavaMap[_, _]])
  private val held = holders.getDeclaredField("consumer")
  private val consumers = of("org.apache.kafka.clients.consumer.Consumer")
  private val poll = consumers.getMethod("poll", classOf[Duration])
  private val count = of("org.apache.kafka.clients.consumer.ConsumerRecords").getMethod("count")
  private val lag = consumers.getMethod("currentLag", partitions)
  private val seek = consumers.getMethod("seek", partitions, classOf[Long])
  private val beginningOffsets = consumers.getMethod("beginningOffsets", classOf[JavaCollection[_]])
  private val endOffsets = consumers.getMethod("endOffsets", classOf[JavaCollection[_]])
  private val close = consumers.getMethod("close", classOf[Duration])
  private val tokens = of("org.apache.spark.kafka010.KafkaTokenUtil$")
  private val needsToken = tokens.getMethod("needTokenUpdate", classOf[JavaMap[_, _]], classOf[Option[_]])
  private val timeouts = of("org.apache.kafka.common.errors.TimeoutException")
  private val outOfRange = of("org.apache.kafka.clients.consumer.OffsetOutOfRangeException")

  held.setAccessible(true)

  private def of(name: String): Class[_] = Class.forName(name, true, loader)

  private def call(method: Method, target: Any, arguments: Any*): AnyRef =
    try method.invoke(target, arguments.map(_.asInstanceOf[AnyRef]): _*)
    catch { case error: InvocationTargetException => throw error.getCause }

  /** Returns Spark's function from a record to its row, which is valid until the next one. */
  def converter(hasHeaders: Boolean): AnyRef => UnsafeRow =
    call(toRow, converters.getConstructor().newInstance(), hasHeaders).asInstanceOf[AnyRef => UnsafeRow]

  /** Returns what Spark's own reader reads, from another offset on. */
  def inputFrom(input: InputPartition, offset: Long): InputPartition = {
    val fields = input.asInstanceOf[Product].productIterator.toSeq
    call(copy, input, fields.updated(KafkaCalls.OffsetField, offset): _*).asInstanceOf[InputPartition]
  }

  def isTimeout(error: Throwable): Boolean = timeouts.isInstance(error)

  def isOutOfRange(error: Throwable): Boolean = outOfRange.isInstance(error)

  /** A consumer of one partition, which Spark makes with the security settings and the token that it has now. */
  class Consumer(partition: AnyRef, parameters: AnyRef) {
    private val holder: AnyRef =
      try newHolder.newInstance(partition, parameters).asInstanceOf[AnyRef]
      catch { case error: InvocationTargetException => throw error.getCause }
    private val consumer = held.get(holder)
    private val hasTokens = HadoopDelegationTokenManager.isServiceEnabled(SparkEnv.get.conf, "kafka")

    /** Whether Spark has a newer token than the consumer was made with. */
    def hasOldToken: Boolean = hasTokens && {
      val used = KafkaCalls.property[AnyRef](holder, "kafkaParamsWithSecurity")
      val cluster = KafkaCalls.property[AnyRef](holder, "clusterConfig")
      call(needsToken, tokens.getField("MODULE$").get(null), used, cluster).asInstanceOf[Boolean]
    }

    /** Records of the last poll, and those after them, as far as the broker has said. */
    var ahead = 0L

    def poll(timeoutMs: Long): Iterator[AnyRef] = {
      val records = call(calls.poll, consumer, Duration.ofMillis(timeoutMs))
      ahead = call(count, records).asInstanceOf[Int] + call(lag, consumer, partition).asInstanceOf[OptionalLong].orElse(0L)
      records.asInstanceOf[JavaIterable[AnyRef]].iterator().asScala
    }

    def seek(offset: Long): Unit = call(calls.seek, consumer, partition, offset)

    def beginning(): Long = offset(beginningOffsets)

    def end(): Long = offset(endOffsets)

    private def offset(asked: Method): Long =
      call(asked, consumer, Collections.singletonList(partition)).asInstanceOf[JavaMap[AnyRef, Long]].get(partition)

    def close(): Unit = call(calls.close, consumer, KafkaCalls.CloseTimeout)
  }
}

private object KafkaCalls extends Logging {
  /** The column of a row that has a record's offset. */
  final val OffsetColumn = 4

  /** The field of what a reader reads that has its first offset. */
  private final val OffsetField = 1
  private final val CloseTimeout = Duration.ofMillis(500)

  def property[T](target: AnyRef, name: String): T = target.getClass.getMethod(name).invoke(target).asInstanceOf[T]

  /** Whether a stream is Kafka's, of a version that has what is called. */
  def fit(stream: ContinuousStream): Boolean =
    stream.getClass.getName == "org.apache.spark.sql.kafka010.KafkaContinuousStream" &&
      (try {
        new KafkaCalls(stream.getClass.getClassLoader)
        true
      } catch {
        case error: ReflectiveOperationException =>
          logWarning(s"$stream is read by Spark's own reader, which is slower: its version has other calls", error)
          false
      })
}
