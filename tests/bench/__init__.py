"""The benchmark's own parts, run on little data: they must reach their end, whatever they measure."""
