"""Commands on log files: `cat`, `play`, `archive`."""
