"""Comparison of two sides (server, archive, directory, lake) at one settled position: `flowstone.spark.verify`."""
