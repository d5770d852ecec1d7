"""Commands that run Spark: `mirror`, `restore`, `verify`."""
