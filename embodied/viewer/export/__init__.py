"""Episodes and comparisons of runs as files: HTML pages and videos."""
