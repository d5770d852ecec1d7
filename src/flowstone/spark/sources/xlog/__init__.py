"""Source `xlog`: directories of log files."""
