"""Parts of `benchmarks.gpu`, each a function that measures on one device and returns rows."""
