"""A replica: receives sessions of a master and makes them durable."""
