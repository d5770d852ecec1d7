"""The parts of the benchmark on little data: each must complete, whatever it measures."""
