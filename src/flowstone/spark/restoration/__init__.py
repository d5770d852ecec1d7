"""The state at a settled position as files of a server, Delta tables or Parquet: `flowstone.spark.restore`."""
