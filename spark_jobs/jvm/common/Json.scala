package org.apache.spark.sql.statefleet

import com.fasterxml.jackson.core.JsonProcessingException
import com.fasterxml.jackson.databind.{DeserializationFeature, ObjectMapper, PropertyNamingStrategies}
import com.fasterxml.jackson.module.scala.DefaultScalaModule
import scala.reflect.{classTag, ClassTag}

/**
 * JSON of case classes, whose fields have their names in snake case there, and of maps, whose keys stay as they are.
 */
object Json {
  private val mapper = new ObjectMapper()
    .registerModule(DefaultScalaModule)
    .setPropertyNamingStrategy(PropertyNamingStrategies.SNAKE_CASE)
    .disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES)

  def write(value: Any): String = mapper.writeValueAsString(value)

  /**
   * Returns the value of a JSON text.
   *
   * @param what The text, for the error.
   */
  def read[T: ClassTag](text: String, what: String): T =
    try mapper.readValue(text, classTag[T].runtimeClass.asInstanceOf[Class[T]])
    catch { case error: JsonProcessingException => throw new IllegalStateException(s"$what is no JSON: $text", error) }
}
