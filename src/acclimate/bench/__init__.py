"""The benchmark: plan, run, result, table and report."""
