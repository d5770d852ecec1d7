"""The data pipeline: settled changes and states of logs as Arrow batches, for Apache Spark through PySpark.

What says which columns there are, which options, which offsets, and what turns rows into batches needs no Spark and no
JVM; only the modules of the data sources themselves import pyspark. Rows are never handled one by one in Python where
a batch can be.
"""
