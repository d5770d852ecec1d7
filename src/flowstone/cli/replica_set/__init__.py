"""Commands on running replica sets: `status`, `explain`, `promote`, `expel` and others."""
