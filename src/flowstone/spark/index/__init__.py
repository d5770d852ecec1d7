"""Plans for Spark jobs that read logs: the files and byte ranges that contain the changes between two settled
positions."""
