"""The limbo: synchronous transactions that wait for a verdict, and the control rows that decide about them."""
