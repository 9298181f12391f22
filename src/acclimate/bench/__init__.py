"""The benchmark: a plan, a run, results, and how they are shown."""
