"""The mirror: settled changes of replica sets into the tables of a lake, exactly once."""
