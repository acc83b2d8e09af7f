"""Counts and sums by key beside engines that cannot be in the same process: other releases of Spark, and Flink."""
