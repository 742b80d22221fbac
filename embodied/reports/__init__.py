"""Reports about runs, rewards and datasets: HTML pages, tables and plots."""
